"""Frozen weights in host memory, and the device buffers (slots) that they are copied to before a block computes.

The weights of a block form one flat buffer, so that a block is one copy whatever its data types. Weights that are not
trained never change: the host's copy is the only permanent one, and nothing is ever copied back.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_ALIGNMENT = 256  # bytes; as torch's own allocations, which kernels may rely on


@dataclass(frozen=True)
class Extract:
    """The position of a tensor inside a block's flat buffer."""

    offset: int  # in bytes
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        """The tensor as a view of a flat buffer."""
        elements = flat[self.offset :][: _num_spanned(self.shape, self.stride) * self.dtype.itemsize].view(self.dtype)
        return elements.as_strided(self.shape, self.stride, elements.storage_offset())

    @classmethod
    def at(cls, tensor: Tensor) -> Extract:
        """The position of a tensor that is a view of a flat buffer."""
        offset = int(tensor.storage_offset()) * tensor.dtype.itemsize
        return cls(offset, tensor.dtype, tensor.shape, tensor.stride())


class HostWeights:
    """The frozen weights of one block in host memory, page-locked if a GPU reads them."""

    def __init__(self, owners: Sequence[tuple[nn.Module, str]], *, pin: bool) -> None:
        """Moves the weights: `owners` are the modules and the names of the weights in them."""
        self.owners = owners
        self.parameters = [getattr(module, name) for module, name in owners]
        self._extracts, self.num_bytes = _layout(self.parameters)
        self.flat = _page_locked(self.num_bytes) if pin else torch.empty(self.num_bytes, dtype=torch.uint8)
        self._at_rest = self.views(self.flat)
        for parameter, view in zip(self.parameters, self._at_rest, strict=True):
            view.copy_(parameter.data)
            parameter.data = view

    @property
    def version(self) -> int:
        """A number that changes with the weights' values, for instance when a checkpoint is loaded."""
        return sum(parameter._version for parameter in self.parameters)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The weights as views of a flat buffer that holds them."""
        return [extract.of(flat) for extract in self._extracts]

    def use(self, flat: Tensor) -> None:
        """Makes the block's parameters refer to a copy of the weights."""
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            parameter.data = view

    def put_back(self) -> None:
        """Makes the block's parameters refer to the weights in host memory."""
        for parameter, view in zip(self.parameters, self._at_rest, strict=True):
            parameter.data = view


class Slot:
    """A buffer on the device that holds the weights of one block at a time."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.holder: int | None = None
        self.version = 0  # of the weights when they were copied
        self.last_use = 0
        self.users: set[Any] = set()  # streams with kernels that read the slot, since its last copy
        self.ready: Any = None  # event at the end of its last copy
        self._storage = self.flat.untyped_storage()
        self.address = self._storage.data_ptr()
        self._own_references = torch._C._storage_Use_Count(self._storage._cdata)

    @property
    def is_referenced(self) -> bool:
        """Whether any tensor outside of this object can see the slot's memory: it must not be overwritten then."""
        references = torch._C._storage_Use_Count(self._storage._cdata)
        return bool(references > self._own_references)


class Transfers:
    """Copies weights into slots on the CPU, where a copy has finished when it returns."""

    pin = False

    def start(self, source: Tensor, slot: Slot) -> None:
        """Starts to copy weights into a slot."""
        slot.flat[: len(source)].copy_(source)

    def wait(self, slot: Slot) -> None:
        """Makes the computation that is launched next wait for the slot's copy."""


class CudaTransfers(Transfers):
    """Copies weights into slots on a side stream, while the GPU computes."""

    pin = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, source: Tensor, slot: Slot) -> None:
        """Copies once the kernels that read the slot have finished; the host does not wait."""
        if slot.ready is None:
            slot.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            slot.users.add(torch.cuda.current_stream(self._device))  # its memory may have been freed on that stream
        for stream in slot.users:
            self._stream.wait_stream(stream)
        slot.users.clear()
        with torch.cuda.stream(self._stream):
            slot.flat[: len(source)].copy_(source, non_blocking=True)
            slot.ready.record(self._stream)

    def wait(self, slot: Slot) -> None:
        """Makes the current stream wait for the slot's copy."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(slot.ready)
        slot.users.add(stream)


def transfers_to(device: torch.device) -> Transfers:
    """The way to copy weights to this device."""
    return CudaTransfers(device) if device.type == "cuda" else Transfers()


def flat_bytes(parameters: Sequence[Tensor]) -> int:
    """Bytes of the flat buffer of these weights."""
    return _layout(parameters)[1]


def _layout(parameters: Sequence[Tensor]) -> tuple[list[Extract], int]:
    extracts, end = [], 0
    for parameter in parameters:
        # A transposed weight stays transposed, as matrix products in 8 bits need it and as compiled code expects.
        stride = parameter.stride()
        if _num_spanned(parameter.shape, stride) != parameter.numel():
            stride = torch.empty(parameter.shape, device="meta").stride()
        extracts.append(Extract(end, parameter.dtype, parameter.shape, stride))
        end += -(-parameter.numel() * parameter.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return extracts, end


def _num_spanned(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements between the first and the last element of a tensor, inclusive."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


class _Pages(mmap.mmap):
    """Anonymous memory that can be weakly referenced."""


def _page_locked(num_bytes: int) -> Tensor:
    """A page-locked buffer of exactly this size: torch's own allocator rounds sizes up to powers of two."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    pages = _Pages(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes)
    torch.cuda.check_error(int(runtime.cudaHostRegister(flat.data_ptr(), num_bytes, 0)))
    # The tensor's memory holds `pages`, so this runs when the last view of it is gone and before the memory is freed.
    weakref.finalize(pages, runtime.cudaHostUnregister, flat.data_ptr()).atexit = False
    return flat
