"""A lane beside the one in which a GPU computes, for the next batch.

The host launches work ahead of the GPU. A batch that is copied in between waits for all that was launched before it;
copied in a stream of its own it arrives meanwhile. Its memory can be used again only when the GPU has read it: so that
no more than three batches are there, one that would come after two in the lane is copied in between after all.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_LARGE = 2**20  # bytes: less is copied faster than one changes streams


def is_worth_a_lane(leaf: Tensor, device: torch.device) -> bool:
    """Whether a tensor should be copied to the device beside its work: plain, on the host, and large."""
    is_plain = type(leaf) is Tensor and leaf.layout is torch.strided and leaf.device.type == "cpu"
    return device.type == "cuda" and is_plain and leaf.nbytes >= _LARGE


class Lane:
    """Copies the large parts of one batch after the other to a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._read: torch.cuda.Event | None = None  # all that reads the batches before the last one is over
        self._is_free = True

    @classmethod
    def on(cls, device: torch.device) -> Lane:
        """The lane to this device; a batch begins."""
        index = torch.cuda.current_device() if device.index is None else device.index
        lane = _lane(torch.device("cuda", index))
        lane._begin()
        return lane

    def _begin(self) -> None:
        self._is_free = self._read is None or bool(self._read.query())  # type: ignore[no-untyped-call]
        self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._read.record(torch.cuda.current_stream(self._device))

    def copied(self, leaf: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor on the device, for what is launched from now on."""
        if not self._is_free:
            return leaf.to(self._device, dtype, non_blocking=True)
        with torch.cuda.stream(self.stream):
            copied = leaf.to(self._device, dtype, non_blocking=True)
        using = torch.cuda.current_stream(self._device)
        using.wait_stream(self.stream)
        copied.record_stream(using)  # or its memory would be given away while it is still read there
        return copied


@cache
def _lane(device: torch.device) -> Lane:
    return Lane(device)
