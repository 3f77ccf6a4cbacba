"""Copies the next batch to a GPU on a separate CUDA stream, while the GPU computes.

The host launches kernels ahead of the GPU. A copy on the compute stream would wait for all kernels launched before it,
while a copy on a separate stream runs at the same time. The memory of a batch can be reused only after the GPU has read
the batch. To keep at most three batches in GPU memory, a third batch in flight is copied on the compute stream instead.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_LARGE = 2**20  # minimum size in bytes; for smaller tensors, switching streams takes longer than the copy


def is_worth_prefetching(leaf: Tensor, device: torch.device) -> bool:
    """Whether to copy a tensor on the prefetch stream, which is true for large plain tensors on the host."""
    is_plain = type(leaf) is Tensor and leaf.layout is torch.strided and leaf.device.type == "cpu"
    return device.type == "cuda" and is_plain and leaf.nbytes >= _LARGE


class PrefetchStream:
    """Copies the large tensors of successive batches to a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._read: torch.cuda.Event | None = None  # recorded after the last kernel that reads an earlier batch
        self._is_free = True

    @classmethod
    def on(cls, device: torch.device) -> PrefetchStream:
        """Returns the stream of this device; call it at the beginning of each batch."""
        index = torch.cuda.current_device() if device.index is None else device.index
        prefetch = _stream_of(torch.device("cuda", index))
        prefetch._begin()
        return prefetch

    def _begin(self) -> None:
        self._is_free = self._read is None or bool(self._read.query())  # type: ignore[no-untyped-call]
        self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._read.record(torch.cuda.current_stream(self._device))

    def copied(self, leaf: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a copy of the tensor on the device, which kernels launched after this call can use."""
        if not self._is_free:
            return leaf.to(self._device, dtype, non_blocking=True)
        with torch.cuda.stream(self.stream):
            copied = leaf.to(self._device, dtype, non_blocking=True)
        using = torch.cuda.current_stream(self._device)
        using.wait_stream(self.stream)
        copied.record_stream(using)  # tells the allocator not to reuse the memory while kernels read it
        return copied


@cache
def _stream_of(device: torch.device) -> PrefetchStream:
    return PrefetchStream(device)
