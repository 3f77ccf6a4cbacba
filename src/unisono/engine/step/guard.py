"""Decides which steps are guarded, and restores a failed step's changes before the step is repeated.

If one rank runs out of memory, the others must not wait for it forever. In a guarded step the all-reduce of gradients
starts only after all ranks have agreed that none failed, so it does not overlap with the backward pass. Therefore only
steps with new input shapes are guarded. After `guard_steps` of them, when the peak memory no longer grows, the
all-reduce overlaps with backward; running out of memory then causes a restart.
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
from unisono.parallel.buffers import BufferBackup
from unisono.parallel.strategy import Strategy

_GROWTH = 1.02  # a peak that grows by a smaller factor counts as unchanged
_MANY = 64  # maximum number of shapes to distinguish; further shapes are distinguished by size only


class Guard:
    """Tracks the shapes of this rank's micro-batches, and copies the model's buffers until the step succeeds."""

    def __init__(self, strategy: Strategy, guard_steps: int) -> None:
        self._strategy, self._steps = strategy, guard_steps
        self._passed: Counter[Hashable] = Counter()  # successful guarded steps, by shape
        self._shapes: list[Hashable] = []  # shapes of the micro-batches of this step
        self._peak = 0.0
        self.buffers = BufferBackup(strategy.model)
        """The model's buffers at the beginning of the step."""

    @property
    def is_possible(self) -> bool:
        """Whether the strategy can guard steps, and needs to because ranks wait for each other within a step."""
        return self._strategy.collective and self._strategy.guardable

    @property
    def is_needed(self) -> bool:
        """Whether too few steps with the shapes of this step have succeeded on this rank."""
        if not self.is_possible or self._steps == 0:
            return False
        return self._steps < 0 or any(self._passed[shape] < self._steps for shape in self._shapes)

    def begin(self) -> None:
        """Begins a step."""
        self._shapes.clear()

    def note_shape(self, data: Any) -> None:
        """Records the shapes of a micro-batch of this step."""
        if self.is_possible and self._steps > 0:
            shape = shape_of(data)
            # Texts of many lengths rarely repeat a shape, so after many shapes only the size counts.
            if shape not in self._passed and len(self._passed) >= _MANY:
                shape = ("so large", num_elements(data).bit_length())
            self._shapes.append(shape)

    def count_step(self, *, guarded: bool) -> None:
        """Counts a step whose gradients are complete."""
        self.buffers.find_constants()
        if not guarded or self._steps < 0:
            return
        device = self._strategy.placement.device
        peak = float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 1.0
        for shape in set(self._shapes):
            self._passed[shape] = 1 if peak > self._peak * _GROWTH else self._passed[shape] + 1
        self._peak = max(peak, self._peak)

    def restore(self) -> None:
        """Restores the buffers and drops the gradients of a failed step, before it is repeated."""
        self._strategy.clear_gradients()
        self.buffers.restore()
        if self._strategy.placement.device.type == "cuda":
            torch.cuda.empty_cache()


def shape_of(data: Any) -> Hashable:
    """Returns the shapes and types of all tensors in a batch, through any nesting of containers."""
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


def num_elements(data: Any) -> int:
    """Returns the number of elements of all tensors in a batch."""
    return sum(leaf.numel() if isinstance(leaf, Tensor) else 1 for leaf in leaves(data))
