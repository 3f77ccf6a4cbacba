"""Where a rank reads: its micro-batches, as positions in the stream.

The micro-batches are a pure function of where the stream starts, so whoever knows that can work them out: the training
process, each of its loader workers, a worker that takes the place of a dead one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unisono.data.order import num_micro_batches, share_of, split


@dataclass(frozen=True)
class Chunk:
    """One micro-batch of one rank: which positions, and where it stands in its step."""

    positions: range
    last: bool
    stand_in: bool  # no sample was left for this rank: it computes another rank's sample with weight 0
    global_batch: range  # all positions of its step


@dataclass(frozen=True)
class Cursor:
    """Where a rank reads: the stream from `start` to `end` in global batches, this rank's part of each."""

    start: int
    end: int | None
    global_batch: int
    micro_batch: int
    rank: int
    world: int

    def chunks(self) -> Iterator[Chunk]:
        """This rank's micro-batches in order; every rank has the same number of them in every step."""
        start = self.start
        while self.end is None or start < self.end:
            count = self.global_batch if self.end is None else min(self.global_batch, self.end - start)
            parts = num_micro_batches(count, self.world, self.micro_batch)
            for number, positions in enumerate(split(share_of(self.rank, self.world, start, count), parts)):
                stand_in = len(positions) == 0
                if stand_in:
                    positions = range(start, start + 1)
                yield Chunk(positions, number == parts - 1, stand_in, range(start, start + count))
            start += count
