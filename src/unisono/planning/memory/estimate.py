"""The predicted GPU memory of a training step, by weights, gradients, optimizer state and activations."""

from __future__ import annotations

from dataclasses import dataclass, fields

from unisono.formatting import format_bytes

GIB = 2**30
WORKSPACE = 32 * 2**20
"""Bytes of workspace that cuBLAS reserves."""
OUTSIDE_TORCH = 0.75 * GIB
"""Bytes that a process uses on a GPU outside of torch's allocator: the CUDA context, kernels, libraries."""
USABLE = 0.95
"""A run fits if its predicted memory is at most this fraction of the GPU's: fragmentation and errors need the rest."""


@dataclass(frozen=True)
class Estimate:
    """Predicted bytes per device at the moment of a step when memory use is highest."""

    weights: int
    gradients: int  # gradients that exist at that moment
    optimizer: int
    average: int
    activations: int  # of one micro-batch, with temporary results
    workspace: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts: the peak of torch's allocated memory."""
        return sum(getattr(self, part.name) for part in fields(self))

    def __str__(self) -> str:
        parts = ((part.name, getattr(self, part.name)) for part in fields(self))
        listing = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size >= 0.05 * GIB)
        return f"{format_bytes(self.total)} ({listing})" if listing else format_bytes(self.total)


def card_memory(gigabytes: float) -> float:
    """Returns the bytes that torch can allocate on a GPU with this much nominal memory."""
    return max(gigabytes * GIB - OUTSIDE_TORCH, 0)
