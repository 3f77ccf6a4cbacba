"""Tensors in host memory that a GPU copies from and to: several tensors form one flat buffer, copied at once."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes, as in torch's allocators; kernels may rely on it


@dataclass(frozen=True)
class Extract:
    """The position of a tensor inside a flat buffer."""

    offset: int  # in bytes
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def end(self) -> int:
        """The end of the tensor inside the buffer, in bytes."""
        return self.offset + _num_spanned(self.shape, self.stride) * self.dtype.itemsize

    def of(self, flat: Tensor) -> Tensor:
        """Returns the tensor as a view of a flat buffer."""
        elements = flat[self.offset : self.end].view(self.dtype)
        return elements.as_strided(self.shape, self.stride, elements.storage_offset())

    @classmethod
    def at(cls, tensor: Tensor) -> Extract:
        """Returns the position of a tensor that is a view of a flat buffer."""
        offset = int(tensor.storage_offset()) * tensor.dtype.itemsize
        return cls(offset, tensor.dtype, tensor.shape, tensor.stride())


class HostTensors:
    """Tensors in one host buffer, page-locked if a GPU copies it."""

    def __init__(self, like: Sequence[Tensor], *, pin: bool) -> None:
        """Allocates uninitialised memory for tensors with the shapes and types of `like`."""
        self.extracts, num_bytes = layout(like)
        self.flat = _page_locked(num_bytes) if pin else torch.empty(num_bytes, dtype=torch.uint8)
        self.views = [extract.of(self.flat) for extract in self.extracts]

    @property
    def num_bytes(self) -> int:
        """The size of the buffer."""
        return len(self.flat)


def flat_bytes(tensors: Sequence[Tensor]) -> int:
    """Returns the bytes of the flat buffer of these tensors."""
    return layout(tensors)[1]


def layout(tensors: Sequence[Tensor]) -> tuple[list[Extract], int]:
    """Returns the positions of these tensors in a flat buffer, and its size in bytes."""
    extracts, end = [], 0
    for tensor in tensors:
        # A transposed weight stays transposed, because 8-bit matrix products and compiled code require it.
        stride = tensor.stride()
        if _num_spanned(tensor.shape, stride) != tensor.numel():
            stride = torch.empty(tensor.shape, device="meta").stride()
        extracts.append(Extract(end, tensor.dtype, tensor.shape, stride))
        end += aligned(tensor.numel() * tensor.dtype.itemsize)
    return extracts, end


def aligned(num_bytes: int) -> int:
    """Returns the next number of bytes at which a tensor may begin."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _num_spanned(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Returns the number of elements between the first and the last element of a tensor, inclusive."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


class _Pages(mmap.mmap):
    """Anonymous memory that can be weakly referenced."""


def _page_locked(num_bytes: int) -> Tensor:
    """Returns a page-locked buffer of exactly this size: torch's own allocator rounds sizes up to powers of two."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    pages = _Pages(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes)
    torch.cuda.check_error(int(runtime.cudaHostRegister(flat.data_ptr(), num_bytes, 0)))
    # The tensor's memory holds `pages`, so this runs when the last view of it is gone and before the memory is freed.
    weakref.finalize(pages, runtime.cudaHostUnregister, flat.data_ptr()).atexit = False
    return flat
