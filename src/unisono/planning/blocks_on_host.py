"""Computes from sizes in bytes which blocks, and how many, have to be stored in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BlocksOnHost:
    """The blocks of a model that have frozen weights, and how many of them are stored in host memory."""

    frozen_bytes: Sequence[int]
    """Bytes of the frozen weights of each block."""
    num_slots: int
    """Number of host blocks for which the device has room at any time: one computes while the next one is copied."""
    num: int = 0
    """Number of blocks on the host."""

    @property
    def chosen(self) -> list[int]:
        """The numbers of the blocks on the host, which are evenly spaced.

        The copy of a block overlaps with the computation of the blocks before it, back to the previous block on the
        host. If the blocks on the host were next to each other, a copy could overlap with only one block's computation.
        """
        return [(2 * i + 1) * len(self.frozen_bytes) // (2 * self.num) for i in range(self.num)]

    @property
    def host_bytes(self) -> int:
        """Bytes of frozen weights in host memory."""
        return sum(self.frozen_bytes[number] for number in self.chosen)

    @property
    def device_bytes(self) -> int:
        """Bytes of frozen weights on the device, including the slots, each of which has room for the largest block."""
        largest = max((self.frozen_bytes[number] for number in self.chosen), default=0)
        return sum(self.frozen_bytes) - self.host_bytes + min(self.num_slots, self.num) * largest

    @property
    def saved_bytes(self) -> int:
        """Bytes of device memory that are saved; 0 if the number of blocks on the host does not exceed the slots."""
        return sum(self.frozen_bytes) - self.device_bytes

    def fewest(self, room: float) -> BlocksOnHost:
        """Returns the variant with the fewest blocks on the host whose device memory fits into `room` bytes.

        If none fits, all blocks are on the host.
        """
        candidates = (replace(self, num=num) for num in range(len(self.frozen_bytes) + 1))
        return next((it for it in candidates if it.device_bytes <= room), replace(self, num=len(self.frozen_bytes)))
