"""The GPU memory of a training step, by what takes it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from unisono.formatting import format_bytes

GIB = 2**30
WORKSPACE = 32 * 2**20
"""Bytes that matrix products of torch's libraries reserve."""
OUTSIDE_TORCH = 0.75 * GIB
"""Memory that a process needs on a GPU beside torch's allocator: the CUDA context, kernels, libraries."""
USABLE = 0.95
"""Fraction of the memory that a prediction may fill; the rest is for fragmentation, and for its error."""


@dataclass(frozen=True)
class Estimate:
    """Bytes per device at the moment of a step that needs most memory."""

    weights: int
    gradients: int  # as far as they exist at that moment
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
    """The bytes that torch can allocate on a GPU that is sold with this much memory."""
    return max(gigabytes * GIB - OUTSIDE_TORCH, 0)
