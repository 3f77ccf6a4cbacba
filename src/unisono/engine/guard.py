"""Which steps are guarded, and what a step that is done again must find as it was.

Out of memory on one rank must not leave another one waiting. In a guarded step no gradient travels before all ranks
have agreed that nobody failed; that costs the overlap of communication and backward. So only steps with new shapes of
input are guarded: after `guard_steps` of them, when the peak of memory no longer grows, gradients travel while
backward runs, and an out of memory that still comes is answered by a restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.data.nested import leaves
from unisono.data.resident import Rows
from unisono.parallel.strategy import Strategy

_GROWTH = 1.02  # a peak that grows by less is the same
_MANY = 64  # shapes; where there are more, each new one is like others before


class Guard:
    """Watches the shapes of this rank's micro-batches, and keeps the buffers of the model for a second try."""

    def __init__(self, strategy: Strategy, guard_steps: int) -> None:
        self._strategy, self._steps = strategy, guard_steps
        self._passed: Counter[Hashable] = Counter()  # guarded steps that went well, by shape
        self._shapes: list[Hashable] = []  # of this step
        self._peak = 0.0
        self._kept: list[tuple[Tensor, Tensor, int]] = []
        self._buffers = [buffer for buffer in strategy.model.buffers() if buffer.numel() > 0]
        self._constant: set[int] = set()  # buffers that a step left alone

    @property
    def possible(self) -> bool:
        """Whether steps can be guarded and need it: only then can ranks wait for each other in the middle of one."""
        return self._strategy.collective and self._strategy.guardable

    @property
    def wanted(self) -> bool:
        """Whether this rank has met shapes in this step that it does not know well."""
        if not self.possible or self._steps == 0:
            return False
        return self._steps < 0 or any(self._passed[shape] < self._steps for shape in self._shapes)

    def begin(self) -> None:
        """A step begins: what a forward pass may change is kept."""
        self._shapes.clear()
        changing = [buffer for buffer in self._buffers if id(buffer) not in self._constant]
        self._kept = [(buffer, buffer.detach().clone(), buffer._version) for buffer in changing]

    def see(self, data: Any) -> None:
        """A micro-batch of this step has arrived."""
        if self.possible and self._steps > 0:
            shape = shape_of(data)
            # Texts of all lengths never come twice in the same shapes: beyond some, they are told apart by size alone.
            if shape not in self._passed and len(self._passed) >= _MANY:
                shape = ("so large", _num_elements(data).bit_length())
            self._shapes.append(shape)

    def passed(self, *, guarded: bool, replayed: bool = False) -> None:
        """The gradients of the step are there; `replayed`: some of them from a recording."""
        # A buffer whose version stands still after a whole step is a table; it need not be kept again. Recorded kernels
        # change buffers without a word.
        if not replayed:
            self._constant |= {id(buffer) for buffer, _, version in self._kept if buffer._version == version}
        self._kept = []
        if not guarded or self._steps < 0:
            return
        device = self._strategy.place.device
        peak = float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 1.0
        for shape in set(self._shapes):
            self._passed[shape] = 1 if peak > self._peak * _GROWTH else self._passed[shape] + 1
        self._peak = max(peak, self._peak)

    @torch.no_grad()
    def rewind(self) -> None:
        """What forward passes of this step have changed so far is as before it: they are done once more."""
        for buffer, kept, version in self._kept:
            if buffer._version != version:
                buffer.copy_(kept)

    @torch.no_grad()
    def restore(self) -> None:
        """The step failed and is done again: the buffers are as before it, and its gradients are gone."""
        self._strategy.clear_gradients()
        for buffer, kept, _ in self._kept:
            buffer.copy_(kept)
        self._kept = []
        if self._strategy.place.device.type == "cuda":
            torch.cuda.empty_cache()


def shape_of(data: Any) -> Hashable:
    """The shapes and types of all tensors in a batch, through any nesting of containers."""
    if isinstance(data, Tensor):
        return data.shape, data.dtype
    if isinstance(data, Rows):
        return data.indices.shape, data.shape
    if isinstance(data, dict):
        return tuple((key, shape_of(value)) for key, value in data.items())
    if isinstance(data, list | tuple):
        return tuple(shape_of(value) for value in data)
    if is_dataclass(data) and not isinstance(data, type):
        return tuple(shape_of(getattr(data, f.name)) for f in fields(data))
    return None


def _num_elements(data: Any) -> int:
    return sum(leaf.numel() if isinstance(leaf, Tensor) else 1 for leaf in leaves(data))
