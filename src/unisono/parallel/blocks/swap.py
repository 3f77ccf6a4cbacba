"""Block swap: stores the weights of some blocks in host memory and copies each block to the device when it computes.

In a run that trains a small part of the blocks (a LoRA) these are the frozen weights. In a full fine-tune they are all
weights, and their gradients (`gradients.py`) and the optimizer's state (`streamed_update.py`) are on the host too.

Two device buffers (slots) are shared by all swapped blocks. When a block computes, in forward or when it is recomputed,
its parameters refer to a slot. When it has finished, the copy of the block after next starts into its slot, on a side
stream, and overlaps with the blocks in between. Backward reads the weights in reverse order.

Two mechanisms make this correct whatever the order of blocks:
- A slot is overwritten only if no tensor refers to its memory, by the reference count of its storage. If every slot is
  referenced, a new slot is added, which takes memory but keeps the result correct.
- So that the autograd graph does not refer to slots, `saved_tensors_hooks` replace a saved weight by its position.
  Backward gets the weight from whichever slot holds the block then, or copies it there first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from unisono.parallel.blocks.gradients import HostGradients
from unisono.parallel.blocks.host_memory import Extract, flat_bytes
from unisono.parallel.blocks.repeated import compiled_forward
from unisono.parallel.blocks.staging import Gradients, HostWeights, Owner, Slot, transfers_to

NUM_SLOTS = 2
"""Slots for all swapped blocks: one block computes while the next one is copied."""

_Use = tuple[int, str]  # block number, and the pass that uses it: forward with gradients, forward without, or backward
_FORWARD, _INFERENCE, _BACKWARD = "forward", "inference", "backward"


@dataclass(frozen=True)
class _SavedWeight:
    """Stands for a weight in the autograd graph."""

    number: int  # of the block
    extract: Extract


class BlockSwap:
    """The swapped blocks of a model, by number in the order of the model."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], device: torch.device, *, trained: bool = False
    ) -> None:
        """Moves the frozen weights of `blocks` to (page-locked) host memory; the weights must not be on meta.

        With `trained`, also moves the trained weights.
        """
        self._device, self.transfers = device, transfers_to(device)
        owners = movable_owners(model, blocks, trained=trained)
        self._blocks = list(blocks)
        self._hosts = [HostWeights(owners[block], pin=self.transfers.pin) for block in blocks]
        self.gradients = HostGradients(self._hosts, device, self.transfers) if trained else None
        """The gradients of the swapped blocks, if their weights are trained."""
        self._slot_bytes = max(host.num_bytes for host in self._hosts)
        self._slots = [Slot(self._slot_bytes, device) for _ in range(min(NUM_SLOTS, len(blocks)))]
        self._depth = [0] * len(blocks)  # number of calls of each block that are in progress
        self._uses = 0
        self._position: tuple[_Use | None, _Use | None] = (None, None)  # the previous use, and the current one
        self._next: dict[tuple[_Use | None, _Use | None], _Use] = {}  # the use that followed each position last time
        self.num_copies = 0
        """Copies from host to device so far."""

    @property
    def device(self) -> torch.device:
        """The device that the blocks compute on."""
        return self._device

    @property
    def hosts(self) -> Sequence[HostWeights]:
        """The weights in host memory, by block."""
        return self._hosts

    @property
    def host_bytes(self) -> int:
        """Host memory that the swapped weights take in this process, in bytes."""
        return sum(host.num_bytes for host in self._hosts)

    @property
    def device_bytes(self) -> int:
        """Bytes of the slots on the device."""
        return len(self._slots) * self._slot_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of the largest swapped block."""
        return self._slot_bytes

    def attach(self, all_blocks: Sequence[nn.Module], *, compiles: bool) -> None:
        """Makes the swapped blocks fetch their weights; compiles all blocks of the model, if `compiles`.

        Fetching must happen outside of compiled code and inside of recomputation, so set up recomputation afterwards.
        """
        numbers = {block: number for number, block in enumerate(self._blocks)}
        for block in all_blocks:
            kind = type(block)
            compute = compiled_forward(kind) if compiles else kind.forward
            # Blocks that stay on the device get the same class, so that they share the compiled code.
            block.__class__ = _swapping(kind, compute)  # type: ignore[arg-type]  # classes are hashable
            number = numbers.get(block)
            block._unisono_swap = None if number is None else (self, number)  # type: ignore[assignment]

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """A context in which the model lacks the swapped weights, for placing everything else on the device."""
        for host in self._hosts:
            for module, name in host.owners:
                module._parameters[name] = None
        try:
            yield
        finally:
            for host in self._hosts:
                for (module, name), parameter in zip(host.owners, host.parameters, strict=True):
                    module._parameters[name] = parameter

    def broadcast(self) -> None:
        """Broadcasts rank 0's swapped weights to all ranks; DDP broadcasts all other weights."""
        staging = self._slots[0]
        staging.holder = None
        for host in self._hosts:
            part = staging.flat[: host.num_bytes]
            part.copy_(host.flat)
            dist.broadcast(part, src=0)
            host.flat.copy_(part)
            host.num_updates += 1

    def compute(self, number: int, call: Callable[..., Any], block: nn.Module, arguments: Any, keywords: Any) -> Any:
        """Returns call(block, *arguments, **keywords), computed with the block's weights on the device."""
        slot = self._slot_with(number)
        self._depth[number] += 1
        try:
            self._hosts[number].use(slot.flat, partial(self._receive, number))
            self._watch_backward(number, arguments, keywords)
            with self._saving_positions():
                result = call(block, *arguments, **keywords)
            # A result that is a view of a weight would outlive the weight's time in the slot.
            return tree_map_only(Tensor, lambda tensor: tensor.clone() if self._slot_at(tensor) else tensor, result)
        finally:
            self._depth[number] -= 1
            if not self._depth[number]:
                self._hosts[number].put_back()
                if not _is_in_backward():  # after recomputing, backward reads the same weights
                    self._copy_ahead()

    def weights_updated(self) -> None:
        """Starts to copy the changed weights to the device; call it after the optimizer has updated the host's copy."""
        for host in self._hosts:
            host.num_updates += 1
        self._copy_ahead()

    def _receive(self, number: int, gradients: Gradients) -> None:
        assert self.gradients is not None
        self.gradients.receive(number, gradients)

    def _slot_with(self, number: int) -> Slot:
        """Returns the slot that holds a block, after its copy; copies the block if no slot holds it."""
        slot = self._holding(number) if self._is_held(number) else None
        if slot is None:
            slot = self._free_slot({number}) or self._new_slot()
            self._copy(number, slot)
        self._uses += 1
        slot.last_use = self._uses
        use = (number, _phase())
        if use != self._position[1]:
            self._next[self._position] = use
            self._position = (self._position[1], use)
            if self.gradients is not None and use[1] == _BACKWARD:
                self.gradients.expect(number)
            self._copy_ahead(keep=number)
        self.transfers.wait(slot)
        return slot

    def _copy_ahead(self, keep: int | None = None) -> None:
        """Starts to copy the blocks that will be used next into slots that are free, the next one first."""
        position, wanted = self._position, {keep}
        for _ in self._slots:
            use = self._expected_after(position)
            position = (position[1], use)
            wanted.add(use[0])
            if not self._is_held(use[0]):
                slot = self._free_slot(wanted)
                if slot is None:
                    return
                self._copy(use[0], slot)

    def _expected_after(self, position: tuple[_Use | None, _Use | None]) -> _Use:
        """Returns the use that followed this position last time, or at first the next block in the model's order."""
        if position in self._next or position[1] is None:
            return self._next.get(position, (0, _FORWARD))
        number, phase = position[1]
        if phase == _BACKWARD:
            return (number - 1, _BACKWARD) if number > 0 else (0, _FORWARD)
        if number + 1 < len(self._blocks):
            return number + 1, phase
        return (number, _BACKWARD) if phase == _FORWARD else (0, _INFERENCE)

    def _holding(self, number: int) -> Slot | None:
        return next((slot for slot in self._slots if slot.holder == number), None)

    def _is_held(self, number: int) -> bool:
        """Whether a slot holds the current weights of a block; frees a slot that holds older ones."""
        slot = self._holding(number)
        if slot is not None and slot.version != self._hosts[number].version:
            slot.holder = None
            return False
        return slot is not None

    def _free_slot(self, wanted: set[int | None]) -> Slot | None:
        """Returns the least recently used slot that can be overwritten; None if there is none."""
        free = [slot for slot in self._slots if slot.holder not in wanted and not slot.is_referenced]
        return min(free, key=lambda slot: slot.last_use, default=None)

    def _new_slot(self) -> Slot:
        self._slots.append(Slot(self._slot_bytes, self._device))
        return self._slots[-1]

    def _copy(self, number: int, slot: Slot) -> None:
        slot.holder, slot.version = number, self._hosts[number].version
        self.num_copies += 1
        self.transfers.start(self._hosts[number].flat, slot)

    def _slot_at(self, tensor: Tensor) -> Slot | None:
        """Returns the slot that a tensor is a view of."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return None
        address = tensor.untyped_storage().data_ptr()
        return next((slot for slot in self._slots if slot.address == address), None)

    def _saving_positions(self) -> AbstractContextManager[Any]:
        """A context in which the autograd graph saves the position of a weight instead of its slot's memory."""
        if not torch.is_grad_enabled():
            return nullcontext()
        # Only the innermost hooks apply: pass on what activation checkpointing (or the user) does with other tensors.
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        outer_pack, outer_unpack = outer or (_unchanged, _unchanged)

        def pack(tensor: Tensor) -> Any:
            slot = self._slot_at(tensor)
            if slot is None or slot.holder is None or tensor.is_conj() or tensor.is_neg():
                return outer_pack(tensor)
            return _SavedWeight(slot.holder, Extract.at(tensor))

        def unpack(saved: Any) -> Any:
            if isinstance(saved, _SavedWeight):
                return saved.extract.of(self._slot_with(saved.number).flat)
            return outer_unpack(saved)

        return saved_tensors_hooks(pack, unpack)

    def _watch_backward(self, number: int, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Copies ahead when backward has computed the gradient of the block's input, its last result."""
        if not torch.is_grad_enabled() or _is_in_backward():
            return
        for argument in (*arguments, *keywords.values()):
            # Register no hook on a leaf: it may be a parameter, on which the hooks of all steps would accumulate.
            if isinstance(argument, Tensor) and argument.grad_fn is not None:
                argument.register_hook(lambda gradient: self._finished_backward(number))  # type: ignore[no-untyped-call]
                return

    def _finished_backward(self, number: int) -> None:
        if self._position[1] == (number, _BACKWARD):
            self._copy_ahead()


def movable_owners(model: nn.Module, blocks: Sequence[nn.Module], *, trained: bool) -> dict[nn.Module, list[Owner]]:
    """Returns the weights of each block that can be stored in host memory: the frozen, and with `trained` all weights.

    Excludes tensor subclasses, and weights that anything else uses too: other blocks, other parts of the model.
    """
    shared = _outside(model, set(blocks))
    num_uses = Counter(
        parameter for block in blocks for module in block.modules() for parameter in module.parameters(recurse=False)
    )
    return {
        block: [
            (module, name)
            for module in block.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if not ((parameter.requires_grad and not trained) or parameter in shared or num_uses[parameter] > 1)
            and type(parameter) is nn.Parameter
        ]
        for block in blocks
    }


def _outside(module: nn.Module, blocks: set[nn.Module]) -> set[nn.Parameter]:
    """Returns the weights that are used outside of the blocks."""
    if module in blocks:
        return set()
    outside = set(module.parameters(recurse=False))
    return outside.union(*(_outside(child, blocks) for child in module.children()))


def swapped_weights(model: nn.Module, blocks: Sequence[nn.Module], *, trained: bool) -> set[nn.Parameter]:
    """Returns the weights that are stored in host memory if these blocks are swapped."""
    owners = movable_owners(model, blocks, trained=trained)
    return {getattr(module, name) for of_block in owners.values() for module, name in of_block}


def frozen_bytes(model: nn.Module, blocks: Sequence[nn.Module]) -> list[int]:
    """Returns the bytes of each block's frozen weights that can be in host memory. The weights may be on meta."""
    owners = movable_owners(model, blocks, trained=False)
    return [flat_bytes([getattr(module, name) for module, name in owners[block]]) for block in blocks]


def trained_bytes(model: nn.Module, blocks: Sequence[nn.Module]) -> list[int]:
    """Returns the bytes of each block's trained weights that can be in host memory. The weights may be on meta."""
    owners = movable_owners(model, blocks, trained=True)
    weights = [[getattr(module, name) for module, name in owners[block]] for block in blocks]
    return [flat_bytes([weight for weight in of_block if weight.requires_grad]) for of_block in weights]


@cache  # one subclass per class of blocks, because torch.compile's guards check the class
def _swapping(plain: type[nn.Module], compute: Any) -> type[nn.Module]:
    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if self._unisono_swap is None:
            return compute(self, *arguments, **keywords)
        swap, number = self._unisono_swap
        return swap.compute(number, compute, self, arguments, keywords)

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})


def _unchanged(value: Any) -> Any:
    return value


def _phase() -> str:
    if _is_in_backward():
        return _BACKWARD
    return _FORWARD if torch.is_grad_enabled() else _INFERENCE


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
