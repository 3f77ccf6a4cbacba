"""Where a rank reads: its micro-batches, as positions in the stream.

The micro-batches are a pure function of where the stream starts, so whoever knows that can work them out: the training
process, each of its loader workers, a worker that takes the place of a dead one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from unisono.data.order import Strides, num_micro_batches, share_of, split
from unisono.data.shapes import Group, Shapes, deal

_LOOK_AT = 2**18  # positions among which a trial looks for the costliest samples


@dataclass(frozen=True)
class Chunk:
    """One micro-batch of one rank: which positions, and where it stands in its step."""

    positions: Sequence[int]  # a range, unless its global batch has samples of several shapes
    last: bool
    is_dummy: bool  # no sample was left for this rank: it computes another rank's sample with weight 0
    global_batch: Sequence[int]  # all positions of its step, in the order in which they would stand in
    shape: Hashable = None  # of its samples, where the data set has shapes


@dataclass(frozen=True)
class Cursor:
    """Where a rank reads: the stream from `start` to `end` in global batches, this rank's part of each."""

    start: int
    end: int | None
    global_batch: int
    micro_batch: int
    rank: int
    world: int
    shapes: Shapes | None = None  # of samples that can be batched only with their like
    epoch: int | None = None  # samples of an epoch, where no step may read on into the next one

    def chunks(self) -> Iterator[Chunk]:
        """This rank's micro-batches in order; every rank has the same number of them in every step."""
        start = self.start
        while self.end is None or start < self.end:
            whole = self._step_at(start)
            groups = self._groups(whole)
            yield from self._by_shape(groups) if len(groups) > 1 else self._alike(whole, groups)
            start = whole.stop

    def most_at_once(self) -> int:
        """How many samples of the first step are in the micro-batch, of whatever rank, that needs most memory.

        One sample cannot be cut: it is of interest only where all micro-batches are so small.
        """
        groups = self._groups(self._step_at(self.start))
        if len(groups) < 2:
            return min(self.micro_batch, -(-self.global_batch // self.world))
        pieces = [piece for turn in deal(groups, self.world, self.micro_batch) for piece in turn if piece is not None]
        costliest = max(pieces, key=lambda piece: (len(piece.positions) > 1, piece.cost))
        return len(costliest.positions)

    def _step_at(self, start: int) -> range:
        stop = Strides(self.global_batch, self.epoch).end(start)
        return range(start, stop if self.end is None else min(stop, self.end))

    def _groups(self, whole: range) -> list[Group]:
        return [] if self.shapes is None else self.shapes.groups(whole)

    def _alike(self, whole: range, groups: Sequence[Group]) -> Iterator[Chunk]:
        """Samples that can be batched as they come: contiguous shares."""
        shape = groups[0].shape if groups else None
        parts = num_micro_batches(len(whole), self.world, self.micro_batch)
        share = share_of(self.rank, self.world, whole.start, len(whole))
        for number, positions in enumerate(split(share, parts)):
            is_dummy = len(positions) == 0
            yield Chunk(positions or whole[:1], number == parts - 1, is_dummy, whole, shape)

    def _by_shape(self, groups: Sequence[Group]) -> Iterator[Chunk]:
        by_cost = sorted(groups, key=lambda group: group.each)
        whole = tuple(position for group in by_cost for position in group.positions)
        turns = deal(groups, self.world, self.micro_batch)
        for number, turn in enumerate(turns):
            mine, last = turn[self.rank], number == len(turns) - 1
            if mine is None:
                yield Chunk(whole[:1], last, True, whole, by_cost[0].shape)
            else:
                yield Chunk(mine.positions, last, False, whole, mine.shape)


@dataclass(frozen=True)
class TrialCursor(Cursor):
    """What to try out, for its memory, before a run begins."""

    def chunks(self) -> Iterator[Chunk]:
        """Where samples differ in shape the costliest micro-batch of all, twice; elsewhere those that come next."""
        groups: Sequence[Group] = ()
        if self.shapes is not None:
            stop = self.start + min(self.shapes.order.num_samples, _LOOK_AT)
            groups = self.shapes.groups(range(self.start, stop if self.end is None else min(stop, self.end)))
        if len(groups) < 2:
            yield from super().chunks()
            return
        costliest = max((group.part(0, self.micro_batch) for group in groups), key=lambda group: group.cost)
        whole = self._step_at(self.start)
        for last in (False, True):  # the second one is computed while the gradients of the first are there
            yield Chunk(costliest.positions, last, False, whole, costliest.shape)
