"""Counts the floating-point operations of training, for the model FLOPs utilization (`mfu`).

The operations of a micro-batch depend on the shapes of its tensors only. So each shape is counted once, in a real
forward and backward pass, when it occurs for the second time: in the first pass a recipe may compile functions. Code
that was compiled is never counted, because under a dispatch mode torch would run it uncompiled, and continue to do so
afterwards. Recomputed activations do not count. The counter sees only PyTorch's own operations, not the kernels that a
recipe launches itself and not the inside of compiled code. A recipe with such code defines `flops`, which is called
when a shape occurs for the first time; the counter is not active then.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from unisono.data.loader import MicroBatch
from unisono.engine.recipe import Recipe
from unisono.engine.step.guard import num_elements, shape_of

_MAX_SHAPES = 64  # the operations of further shapes are estimated from the nearest size
_MAX_NAMED = 1024  # further shapes are distinguished by size only
_PER_OCTAVE = 8  # number of distinct sizes per factor of two
_Shape = tuple[str, str, Hashable]  # group of weights that is trained; kind and value of the shape


class FlopMeter:
    """Counts the operations of the steps on this rank."""

    def __init__(self, recipe: Recipe, *, peak: float | None, can_count: bool, sharing: int = 1) -> None:
        """`peak` is the device's rate in FLOP/s; without it nothing is counted.

        `can_count`: operations are visible to a dispatch mode; otherwise only Recipe.flops() knows their number.
        `sharing`: the number of ranks that share a sample; each computes 1 / `sharing` of Recipe.flops().
        """
        self.peak, self._sharing = peak, sharing
        self._recipe, self._has_formula = recipe, type(recipe).flops is not Recipe.flops
        self._has_groups = bool(recipe.groups())
        self._active = peak is not None and (can_count or self._has_formula)
        self._can_count = can_count
        self._flops: dict[_Shape, float] = {}  # operations of a micro-batch, by shape
        self._sizes: dict[_Shape, int] = {}  # number of elements, of every shape so far
        self._step: Counter[_Shape] = Counter()  # micro-batches of the current step
        self._finished: Counter[_Shape] = Counter()  # micro-batches of finished steps, until `per_step` reads them
        self._num_steps = 0
        self._counter = _Counter()
        self._asked: set[_Shape] = set()  # shapes that Recipe.flops() was called for
        self._open: _Shape | None = None  # the shape that is being counted
        self._asks = False  # whether Recipe.flops() is called for the open shape, instead of counting

    def begin_step(self) -> None:
        """Begins a step, or repeats one."""
        self._step.clear()
        self._open = None

    def begin(self, micro: MicroBatch) -> None:
        """Begins a micro-batch; its passes follow in `counting`."""
        self._open = None
        if not self._active or micro.is_dummy:
            return
        size = num_elements(micro.data)
        group = self._recipe.group if self._has_groups else ""  # each group has its own loss
        shape: _Shape = (group, "shape", shape_of(micro.data))
        if shape not in self._sizes and len(self._sizes) >= _MAX_NAMED:  # texts rarely repeat a shape
            shape = (group, "size", round(_PER_OCTAVE * math.log2(max(1, size))))
        self._step[shape] += 1
        is_new = shape not in self._sizes
        if is_new:
            self._sizes[shape] = size
        self._asks = self._has_formula and shape not in self._asked
        is_due = self._asks or (not is_new and self._may_count)
        if shape not in self._flops and is_due and len(self._flops) < _MAX_SHAPES:
            self._open, self._counter.flops = shape, 0.0

    @property
    def _may_count(self) -> bool:
        """Whether a dispatch mode sees all operations and changes none: true if this process has compiled nothing."""
        compiler = sys.modules.get("torch._dynamo.utils")
        return self._can_count and (compiler is None or not compiler.counters["frames"]["total"])

    def see(self, batch: Any) -> None:
        """Calls Recipe.flops() with the data of the current micro-batch, which is on the device now."""
        if self._open is None or not self._asks:
            return
        flops = self._recipe.flops(batch)
        self._asked.add(self._open)
        if flops is not None or not self._can_count:
            self._flops[self._open] = (flops or 0.0) / self._sharing
        self._open = None

    def counting(self) -> AbstractContextManager[Any]:
        """A context for the forward or the backward pass of a micro-batch."""
        return nullcontext() if self._open is None or self._asks else self._counter

    def end(self) -> None:
        """Ends a micro-batch whose backward pass is complete."""
        if self._open is not None and not self._asks:
            self._flops[self._open], self._open = self._counter.flops, None

    def end_step(self) -> None:
        """Ends a step that was computed completely."""
        self._finished += self._step
        self._num_steps += 1
        self._step.clear()

    def per_step(self) -> float | None:
        """Returns the mean number of operations per step since the last call; None if it is not known."""
        finished, steps = self._finished, self._num_steps
        self._finished, self._num_steps = Counter(), 0
        if not self._active or not steps or (finished and not any(self._flops.values())):
            return None
        return sum(number * self._of(shape) for shape, number in finished.items()) / steps

    def _of(self, shape: _Shape) -> float:
        if shape in self._flops:
            return self._flops[shape]
        size = self._sizes[shape]
        near = min(self._flops, key=lambda other: (other[0] != shape[0], abs(self._sizes[other] - size)))
        return self._flops[near] * size / max(1, self._sizes[near])


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the operations of matrix products, convolutions and attention."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        formula = flop_registry.get(getattr(function, "_overloadpacket", None))
        if formula is not None and not _is_recomputing():
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


def _is_recomputing() -> bool:
    """Whether activation checkpointing computes a forward pass again, inside a backward pass.

    A backward pass runs with gradients disabled and without hooks for saved tensors; recomputing enables gradients and
    sets hooks. Autograd functions disable gradients in their forward pass, so inside them only the hooks show it.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    return torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
