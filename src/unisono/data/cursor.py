"""Determines the micro-batches of a rank, as positions in the sample stream.

The micro-batches are a pure function of the position at which the stream starts. So the training process, each of its
loader workers and a worker that replaces a dead one can all compute them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from unisono.data.order import Strides, num_micro_batches, share_of, split
from unisono.data.shapes import Group, Shapes, deal

_SEARCHED = 2**18  # number of positions in which a trial searches for the most expensive samples


@dataclass(frozen=True)
class Chunk:
    """The positions of one micro-batch of one rank."""

    positions: Sequence[int]  # a range, unless the global batch has samples of several shapes
    last: bool  # whether it is the last micro-batch of its step
    is_dummy: bool  # whether this rank has no sample left and computes another rank's sample with weight 0
    global_batch: Sequence[int]  # all positions of the step, in the order in which they replace unreadable samples
    shape: Hashable = None  # shape of its samples, if the dataset has shapes


@dataclass(frozen=True)
class Cursor:
    """This rank's part of each global batch of the stream from `start` to `end`."""

    start: int
    end: int | None
    global_batch: int
    micro_batch: int
    rank: int
    world: int
    shapes: Shapes | None = None  # set if only samples of the same shape can form a batch
    epoch: int | None = None  # samples per epoch, if no step may continue into the next epoch

    def chunks(self) -> Iterator[Chunk]:
        """Yields this rank's micro-batches in order. In each step, all ranks have the same number of micro-batches."""
        start = self.start
        while self.end is None or start < self.end:
            whole = self._step_at(start)
            groups = self._groups(whole)
            yield from self._by_shape(groups) if len(groups) > 1 else self._alike(whole, groups)
            start = whole.stop

    def most_at_once(self) -> int:
        """Returns the number of samples of the first step's micro-batch that needs the most memory, on any rank.

        Micro-batches of one sample cannot be split, so they are considered only if there are no others.
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
        """Yields micro-batches of a step whose samples all have the same shape: contiguous slices of the positions."""
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
    """The micro-batches of a trial, which checks before training whether a micro-batch fits into memory."""

    def chunks(self) -> Iterator[Chunk]:
        """Yields the most expensive micro-batch twice if samples differ in shape; otherwise the next micro-batches."""
        groups: Sequence[Group] = ()
        if self.shapes is not None:
            stop = self.start + min(self.shapes.order.num_samples, _SEARCHED)
            groups = self.shapes.groups(range(self.start, stop if self.end is None else min(stop, self.end)))
        if len(groups) < 2:
            yield from super().chunks()
            return
        costliest = max((group.part(0, self.micro_batch) for group in groups), key=lambda group: group.cost)
        whole = self._step_at(self.start)
        for last in (False, True):  # the second pass needs more memory, because gradients of the first one exist
            yield Chunk(costliest.positions, last, False, whole, costliest.shape)
