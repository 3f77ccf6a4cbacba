"""Restores a model's buffers (batch norm statistics, counters, lookup tables) after a step that is repeated or skipped.

A step that is repeated after running out of memory, or skipped because it was not finite, must not change buffers. So
buffers are copied before each step. The device decides whether a step is skipped, and the host does not know the
decision; `undo_where` therefore selects old or new values on the device, with one kernel per buffer. Buffers that the
first steps did not change (lookup tables) are no longer copied.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_OBSERVED_STEPS = 3  # steps that must not change a buffer before it counts as constant


class BufferSlots:
    """The slots in which a model stores its buffers; they stay valid when code assigns a new tensor to a buffer."""

    def __init__(self, model: nn.Module) -> None:
        self._slots: list[tuple[dict[str, Tensor | None], str]] = []
        self.statistics: set[int] = set()
        """Slots of batch and instance norms, whose kernels change a buffer without increasing its version."""
        self._initial: list[Tensor | None] = []  # the first tensor of each slot
        seen: set[int] = set()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None or id(buffer) not in seen:  # modules may share a buffer
                    seen.add(id(buffer))
                    if isinstance(module, _NormBase):
                        self.statistics.add(len(self._slots))
                    self._slots.append((module._buffers, name))
                    self._initial.append(buffer)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, slot: int) -> Tensor | None:
        owner, name = self._slots[slot]
        return owner.get(name)

    def __setitem__(self, slot: int, tensor: Tensor) -> None:
        owner, name = self._slots[slot]
        owner[name] = tensor

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context for passes that are recorded as CUDA graphs, whose kernels always read the same tensors.

        If code assigns a new tensor to a buffer (`self.mean = 0.9 * self.mean + …`), the old tensor gets its values.
        """
        before = [self[slot] for slot in range(len(self))]
        yield
        with torch.no_grad():
            for slot, old in enumerate(before):
                new = self[slot]
                if old is not None and new is not None and new is not old and _is_like(new, old):
                    old.copy_(new)
                    self[slot] = old

    def tensors(self) -> list[Tensor]:
        """Returns the current non-empty buffers for a collective, with the same shapes on every rank.

        A cache that grows with its input has different shapes on different ranks, which would block a collective. For a
        buffer whose shape or type has changed, the slot's first tensor is returned instead.
        """
        pairs = ((self[slot], first) for slot, first in enumerate(self._initial) if first is not None)
        return [now if now is not None and _is_like(now, first) else first for now, first in pairs if first.numel() > 0]


@dataclass(slots=True)
class _Before:
    """The state of a buffer before the step."""

    slot: int
    tensor: Tensor
    version: int
    copy: Tensor | None  # None for a constant buffer


class BufferBackup:
    """Copies a model's buffers at the start of each step, and restores them if the step is repeated or skipped."""

    def __init__(self, model: nn.Module) -> None:
        self._slots = BufferSlots(model)
        self._changing = set(self._slots.statistics)
        self._unchanged: Counter[int] = Counter()  # for each slot, the number of observed steps that did not change it
        self._copies: dict[int, Tensor] = {}  # memory for the copies, by slot
        self._before: list[_Before] = []

    def save(self) -> None:
        """Copies the buffers, at the beginning of a step."""
        if not len(self._slots):
            return
        now = [(slot, tensor) for slot in range(len(self._slots)) if (tensor := self._slots[slot]) is not None]
        copied = [(slot, tensor) for slot, tensor in now if tensor.numel() > 0 and not self._is_constant(slot)]
        copies = {slot: self._memory_for(slot, tensor) for slot, tensor in copied}
        with torch.no_grad():
            _copy_all(list(copies.values()), [tensor.detach() for _, tensor in copied])
        self._before = [_Before(slot, tensor, tensor._version, copies.get(slot)) for slot, tensor in now]

    def _is_constant(self, slot: int) -> bool:
        return self._unchanged[slot] >= _OBSERVED_STEPS and slot not in self._changing

    def _memory_for(self, slot: int, tensor: Tensor) -> Tensor:
        memory = self._copies.get(slot)
        if memory is None or not _is_like(memory, tensor):
            memory = self._copies[slot] = torch.empty_like(tensor, requires_grad=False)
        return memory

    def find_constants(self) -> None:
        """Notes which buffers a step did not change; called after its last backward pass.

        In the first steps it synchronises with the device and compares values, because `buffer.data.mul_()` and
        recorded kernels do not increase a tensor's version.
        """
        for before in self._before:
            slot = before.slot
            if slot in self._changing:
                continue
            if self._is_changed(before) or (before.copy is not None and not torch.equal(before.tensor, before.copy)):
                self._changing.add(slot)
            elif before.copy is not None:
                self._unchanged[slot] += 1
                if self._unchanged[slot] == _OBSERVED_STEPS:
                    del self._copies[slot]

    @torch.no_grad()
    def rewind(self) -> None:
        """Undoes the changes of this step's forward passes so far; the step continues."""
        for before in self._before:
            self._put_back(before)
            before.version = before.tensor._version  # restoring the buffer does not count as a change

    @torch.no_grad()
    def restore(self) -> None:
        """Undoes the changes of the step."""
        for before in self._before:
            self._put_back(before)
        self._before = []

    def undo_where(self, skipped: Tensor) -> None:
        """Undoes the changes of the step if `skipped`, a number on the device, is not 0; without a host sync."""
        if not self._before:
            return
        if skipped.device.type == "cpu":  # reading it is free
            if bool(skipped):
                self.restore()
        else:
            self._undo_on_device(skipped != 0)
        self._before = []

    @torch.no_grad()
    def _undo_on_device(self, skipped: Tensor) -> None:
        for before in self._before:
            now = self._slots[before.slot]
            old = before.tensor if before.copy is None else before.copy
            if now is None or (before.copy is None and now is before.tensor):
                continue
            if _is_like(now, old):
                chosen = torch.where(skipped.to(now.device), old, now, out=now if now is before.tensor else None)
                if now is not before.tensor:  # a new tensor may share memory with a batch or a weight
                    self._slots[before.slot] = chosen
            elif bool(skipped):  # the shape has changed, which needs a host-device sync
                self._put_back(before)

    def _is_changed(self, before: _Before) -> bool:
        return self._slots[before.slot] is not before.tensor or before.tensor._version != before.version

    def _put_back(self, before: _Before) -> None:
        if self._slots[before.slot] is not before.tensor:
            self._slots[before.slot] = before.tensor
        if before.copy is not None:
            before.tensor.copy_(before.copy)

    @property
    def num_copied(self) -> int:
        """Number of buffers copied for the current step."""
        return sum(before.copy is not None for before in self._before)


def _is_like(one: Tensor, two: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies with one kernel launch per type instead of one per tensor."""
    by_type: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        pair = by_type[source.dtype, source.device]
        pair[0].append(target)
        pair[1].append(source)
    for to, from_ in by_type.values():
        torch._foreach_copy_(to, from_)
