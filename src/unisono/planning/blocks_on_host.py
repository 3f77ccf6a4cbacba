"""Which blocks wait in host memory, and how many must, by arithmetic on bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BlocksOnHost:
    """The blocks of a model that have frozen weights, and how many of them wait in host memory."""

    frozen_bytes: Sequence[int]
    """Bytes of the frozen weights of each block."""
    num_slots: int
    """Blocks on the host that are also on the device at any time: one computes while the next one is copied."""
    num: int = 0
    """Number of blocks on the host."""

    @property
    def chosen(self) -> list[int]:
        """The numbers of the blocks on the host: evenly spaced.

        The copy of a block overlaps with the computation of all blocks up to the one before it. If the blocks on the
        host were next to each other, each copy would have only a single block's computation to overlap with.
        """
        return [(2 * i + 1) * len(self.frozen_bytes) // (2 * self.num) for i in range(self.num)]

    @property
    def host_bytes(self) -> int:
        """Frozen bytes in host memory."""
        return sum(self.frozen_bytes[number] for number in self.chosen)

    @property
    def device_bytes(self) -> int:
        """Frozen bytes of all blocks on the device, including the slots, which hold the largest block each."""
        largest = max((self.frozen_bytes[number] for number in self.chosen), default=0)
        return sum(self.frozen_bytes) - self.host_bytes + min(self.num_slots, self.num) * largest

    @property
    def saved_bytes(self) -> int:
        """Device memory that is saved; 0 if no more blocks are on the host than there are slots."""
        return sum(self.frozen_bytes) - self.device_bytes

    def fewest(self, room: float) -> BlocksOnHost:
        """As few blocks on the host as possible, so that the others and the slots fit into `room` bytes.

        All blocks if even that does not fit.
        """
        candidates = (replace(self, num=num) for num in range(len(self.frozen_bytes) + 1))
        return next((it for it in candidates if it.device_bytes <= room), replace(self, num=len(self.frozen_bytes)))
