"""Computes how many and which blocks of a model have to be stored in host memory, from their sizes in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BlocksOnHost:
    """The blocks of a model that can be stored in host memory, and how many of them are."""

    movable_bytes: Sequence[int]
    """Bytes that each block takes on the device or on the host: its frozen weights or, for blocks that are trained, its
    weights, gradients, optimizer state and average."""
    num_slots: int
    """Number of host blocks that are on the device at the same time: one computes while the next one is copied."""
    num: int = 0
    """Number of blocks on the host."""
    slot_bytes: Sequence[int] | None = None
    """Bytes of each block on the device while it computes, if it needs only its weights and gradients there."""

    @property
    def is_trained(self) -> bool:
        """Whether the weights on the host are trained."""
        return self.slot_bytes is not None

    @property
    def chosen(self) -> list[int]:
        """The indices of the blocks on the host, which are evenly spaced.

        The copy of a block overlaps with the computation of the blocks before it, back to the previous block on the
        host. If the blocks on the host were next to each other, a copy could overlap with only one block's computation.
        """
        return [(2 * i + 1) * len(self.movable_bytes) // (2 * self.num) for i in range(self.num)]

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(self.movable_bytes[number] for number in self.chosen)

    @property
    def device_bytes(self) -> int:
        """Bytes of all blocks on the device, plus the slots, each of which has room for the largest block."""
        sizes = self.movable_bytes if self.slot_bytes is None else self.slot_bytes
        largest = max((sizes[number] for number in self.chosen), default=0)
        return sum(self.movable_bytes) - self.host_bytes + min(self.num_slots, self.num) * largest

    @property
    def saved_bytes(self) -> int:
        """Device memory saved, in bytes; 0 or less if no more blocks are on the host than there are slots."""
        return sum(self.movable_bytes) - self.device_bytes

    def fewest(self, room: float) -> BlocksOnHost:
        """Returns the variant with the fewest blocks on the host whose device memory fits into `room` bytes.

        If none fits, all blocks are on the host.
        """
        candidates = (replace(self, num=num) for num in range(len(self.movable_bytes) + 1))
        return next((it for it in candidates if it.device_bytes <= room), replace(self, num=len(self.movable_bytes)))
