"""A block's weights in host memory, and the device buffers (slots) that they are copied to before a block computes.

The weights of a block form one flat buffer, so that a block is one copy whatever its data types. The host's copy is the
only permanent one. Frozen weights never change; the optimizer step changes trained weights on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from unisono.parallel.blocks.host_memory import HostTensors

Owner = tuple[nn.Module, str]
"""A module, and the name of a weight in it."""
Gradients = Sequence[Tensor | None]


class HostWeights:
    """The weights of one block in host memory, page-locked if a GPU reads them."""

    def __init__(self, owners: Sequence[Owner], *, pin: bool) -> None:
        """Moves the weights to the host; `owners` are the modules, with the names of the weights in them."""
        self.owners = sorted(owners, key=lambda owner: not getattr(*owner).requires_grad)  # trained ones first
        self.parameters: list[nn.Parameter] = [getattr(module, name) for module, name in self.owners]
        self.num_trained = sum(parameter.requires_grad for parameter in self.parameters)
        self.memory = HostTensors(self.parameters, pin=pin)
        self.num_updates = 0
        """Number of times that the optimizer has changed the weights."""
        for parameter, view in zip(self.parameters, self.memory.views, strict=True):
            view.copy_(parameter.data)
            parameter.data = view

    @property
    def flat(self) -> Tensor:
        """The buffer of all weights."""
        return self.memory.flat

    @property
    def num_bytes(self) -> int:
        """The size of the buffer."""
        return self.memory.num_bytes

    @property
    def trained(self) -> list[nn.Parameter]:
        """The weights that are trained."""
        return self.parameters[: self.num_trained]

    @property
    def version(self) -> int:
        """A number that changes with the weights' values, for instance when a checkpoint is loaded."""
        return self.num_updates + sum(parameter._version for parameter in self.parameters)

    def use(self, flat: Tensor, receive: Callable[[Gradients], None]) -> None:
        """Makes the block compute with a copy of the weights on the device.

        Backward passes the gradients of the trained weights to `receive`, all at once.
        """
        views = [extract.of(flat) for extract in self.memory.extracts]
        first = 0
        if self.num_trained and torch.is_grad_enabled():
            # Do not assign to parameter.data: autograd would add the gradients to parameter.grad, on the device.
            first = self.num_trained
            fetched = _Fetched.apply(torch.empty(0, requires_grad=True), views[:first], receive)  # type: ignore[no-untyped-call]
            for (module, name), weight in zip(self.owners, fetched, strict=False):
                module._parameters[name] = weight
        for parameter, view in zip(self.parameters[first:], views[first:], strict=True):
            parameter.data = view

    def put_back(self) -> None:
        """Makes the block's parameters refer to the weights in host memory again."""
        for (module, name), parameter, view in zip(self.owners, self.parameters, self.memory.views, strict=True):
            module._parameters[name] = parameter
            parameter.data = view


class _Fetched(Function):
    """Weights on the device; its backward pass runs when the gradients of all of them are complete."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, views: list[Tensor], receive: Callable[[Gradients], None]) -> Any:
        ctx.receive = receive
        ctx.set_materialize_grads(False)
        return tuple(view.detach() for view in views)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.receive(gradients)
        return None, None, None


class Slot:
    """A buffer on the device that holds the weights of one block at a time."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        with hidden_from_modes():
            self.flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.holder: int | None = None
        self.version = 0  # of the weights when they were copied
        self.last_use = 0
        self.users: set[Any] = set()  # streams with kernels that use the slot, since its last copy
        self.ready: Any = None  # event at the end of its last copy from the host
        self.written: Any = None  # event at the end of its last copy to the host
        self._storage = self.flat.untyped_storage()
        self.address = self._storage.data_ptr()
        self._own_references = torch._C._storage_Use_Count(self._storage._cdata)

    @property
    def is_referenced(self) -> bool:
        """Whether any tensor outside of this object can see the slot's memory; if so, it must not be overwritten."""
        references = torch._C._storage_Use_Count(self._storage._cdata)
        return bool(references > self._own_references)


class Transfers:
    """Copies between host memory and slots on the CPU, where a copy has finished when it returns."""

    pin = False

    def start(self, source: Tensor, slot: Slot, offset: int = 0, after: Any = None) -> None:
        """Starts to copy host memory into a slot; `after`: what `write` returned when the source was written."""
        with hidden_from_modes():
            slot.flat[offset:][: len(source)].copy_(source)

    def wait(self, slot: Slot) -> None:
        """Makes the computation that is launched next wait for the copy into the slot."""

    def reuse(self, slot: Slot) -> None:
        """Makes the computation that is launched next wait until the slot's last content is in host memory."""

    def write(self, slot: Slot, target: Tensor, offset: int = 0) -> Any:
        """Starts to copy a part of a slot to host memory, once the computation launched so far has written it."""
        target.copy_(slot.flat[offset:][: len(target)])

    def finish(self) -> None:
        """Makes all computation and all copies that are launched next wait for the copies to the host."""


class CudaTransfers(Transfers):
    """Copies on two side streams, one per direction, while the GPU computes."""

    pin = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, source: Tensor, slot: Slot, offset: int = 0, after: Any = None) -> None:
        """Copies once kernels and copies that use the slot have finished; the host does not wait."""
        if slot.ready is None:
            slot.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            slot.users.add(torch.cuda.current_stream(self._device))  # its memory may have been freed on that stream
        for stream in slot.users:
            self._in.wait_stream(stream)
        slot.users.clear()
        for event in (slot.written, after):
            if event is not None:
                self._in.wait_event(event)
        with torch.cuda.stream(self._in), hidden_from_modes():
            slot.flat[offset:][: len(source)].copy_(source, non_blocking=True)
            slot.ready.record(self._in)

    def wait(self, slot: Slot) -> None:
        """Makes the current stream wait for the copy into the slot."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(slot.ready)
        slot.users.add(stream)

    def reuse(self, slot: Slot) -> None:
        """Makes the current stream wait until the slot's last content is in host memory."""
        stream = torch.cuda.current_stream(self._device)
        if slot.written is not None:
            stream.wait_event(slot.written)
        slot.users.add(stream)

    def write(self, slot: Slot, target: Tensor, offset: int = 0) -> Any:
        """Copies a part of the slot to the host once the current stream has written it; the host does not wait."""
        slot.written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            target.copy_(slot.flat[offset:][: len(target)], non_blocking=True)
            slot.written.record(self._out)
        return slot.written

    def finish(self) -> None:
        """Makes the current stream and later copies from the host wait for all copies to the host."""
        torch.cuda.current_stream(self._device).wait_stream(self._out)
        self._in.wait_stream(self._out)


def hidden_from_modes() -> AbstractContextManager[None]:
    """A context whose operations torch's dispatch modes do not see.

    Selective activation checkpointing expects the same operations when it recomputes a block, but which copies start
    then depends on which blocks are on the device.
    """
    return torch._C._DisableTorchDispatch()


def transfers_to(device: torch.device) -> Transfers:
    """Returns the object that copies weights to this device and back."""
    return CudaTransfers(device) if device.type == "cuda" else Transfers()
