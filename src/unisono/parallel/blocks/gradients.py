"""Gradients of swapped blocks: accumulated on the device while a block computes backward, and stored in host memory.

Autograd passes all gradients of a block at once (see `staging.py`). They go to a device buffer, are added to those of
earlier micro-batches, and are copied to the host while the next block computes. Their norms are computed on the way, so
that clipping reads no gradient again. Two buffers are enough, and bound the memory however far the host runs ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.parallel.blocks.host_memory import HostTensors
from unisono.parallel.blocks.staging import Gradients, HostWeights, Slot, Transfers

_NUM_SLOTS = 2


class HostGradients:
    """The gradients of the trained weights of all swapped blocks; `parameter.grad` is the tensor in host memory."""

    def __init__(self, hosts: Sequence[HostWeights], device: torch.device, transfers: Transfers) -> None:
        self._hosts, self._device, self._transfers = hosts, device, transfers
        self.memory = [HostTensors(host.trained, pin=transfers.pin) for host in hosts]
        self._slot_bytes = max(memory.num_bytes for memory in self.memory)
        self._free = [Slot(self._slot_bytes, device) for _ in range(min(_NUM_SLOTS, len(hosts)))]
        self._fetched: dict[int, Slot] = {}  # by block: buffers with the gradients of earlier micro-batches
        self._written: dict[int, object] = {}  # by block: the last copy to the host
        self._norms: dict[int, Tensor] = {}  # by id() of the gradient in host memory

    @property
    def num_bytes(self) -> int:
        """Host memory of all gradients, in bytes."""
        return sum(memory.num_bytes for memory in self.memory)

    def expect(self, number: int) -> None:
        """Starts to copy a block's gradients of earlier micro-batches to the device, as its backward pass begins."""
        if number not in self._fetched and any(weight.grad is not None for weight in self._hosts[number].trained):
            slot = self._fetched[number] = self._take()
            self._transfers.start(self.memory[number].flat, slot, after=self._written.get(number))

    @torch.no_grad()
    def receive(self, number: int, gradients: Gradients) -> None:
        """Adds gradients of a block, on the device, to those in host memory."""
        self.expect(number)
        weights, memory = self._hosts[number].trained, self.memory[number]
        if (slot := self._fetched.pop(number, None)) is not None:
            self._transfers.wait(slot)
        else:
            slot = self._take()
            self._transfers.reuse(slot)
        totals = [extract.of(slot.flat) for extract in memory.extracts]
        new, added = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for weight, total, gradient, view in zip(weights, totals, gradients, memory.views, strict=True):
            if gradient is not None:
                (new if weight.grad is None else added).append((total, gradient))
                weight.grad = view
        if new:
            torch._foreach_copy_([total for total, _ in new], [gradient for _, gradient in new])
        if added:
            torch._foreach_add_([total for total, _ in added], [gradient for _, gradient in added])
        self._store(number, slot, totals)

    def average(self, world: int) -> None:
        """Averages the gradients of all blocks across ranks; all ranks must have gradients of the same weights."""
        for number, memory in enumerate(self.memory):
            self.expect(number)
            slot = self._fetched.pop(number, None)
            if slot is not None:
                self._transfers.wait(slot)
                summed = slot.flat[: memory.num_bytes].view(memory.extracts[0].dtype)
                dist.all_reduce(summed)
                summed.div_(world)
                self._store(number, slot, [extract.of(slot.flat) for extract in memory.extracts])

    def norms(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the norm of each tensor, on the device: gradients in host memory, or tensors on the device."""
        others = [tensor for tensor in tensors if id(tensor) not in self._norms]
        computed = iter(torch._foreach_norm(others) if others else [])
        return [self._norms[id(tensor)] if id(tensor) in self._norms else next(computed) for tensor in tensors]

    def forget(self) -> None:
        """Prepares for the next step, or for repeating a failed step."""
        self._free += self._fetched.values()
        self._fetched.clear()
        self._norms.clear()

    def _take(self) -> Slot:
        """Returns a free buffer; allocates another one if the order of blocks requires it."""
        return self._free.pop(0) if self._free else Slot(self._slot_bytes, self._device)

    def _store(self, number: int, slot: Slot, totals: Sequence[Tensor]) -> None:
        views, memory = self.memory[number].views, self.memory[number]
        used = [place for place, weight in enumerate(self._hosts[number].trained) if weight.grad is not None]
        if used:
            norms = torch._foreach_norm([totals[place] for place in used])
            self._norms.update({id(views[place]): norm for place, norm in zip(used, norms, strict=True)})
        self._written[number] = self._transfers.write(slot, memory.flat)
        self._free.append(slot)
