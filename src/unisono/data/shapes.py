"""Micro-batches of samples that have one shape, where a data set has several.

A data set says which samples are alike; the samples of one global batch are then grouped, and the groups are cut into
micro-batches and dealt out to the ranks. No sample changes its global batch, and positions keep their seeds and their
noise, so the grouping is arithmetic: a pure function of the data set, the order and where the global batch lies, which
every rank and every loader worker works out for itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from unisono.data.bits import key_of
from unisono.data.order import Order, share_of
from unisono.errors import RecipeError

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_TRIES = 8  # groups, the costliest, that may be spread over all ranks: each is a trial


class Shaped(Protocol):
    """A map-style data set whose samples can be batched only with their like.

    It may also have `cost(index) -> float`: how much work and memory a sample takes, relative to others. Otherwise that
    is the product of its shape where the shape is a tuple of numbers, and the same for all where it is not.
    """

    def shape(self, index: int) -> Hashable:
        """What the sample must have in common with others to be in a batch with them; known without reading it."""


def is_shaped(data: Any) -> TypeIs[Shaped]:
    """Whether a data set has samples of several shapes; a tensor is a data set too, but its `shape` is no method."""
    return callable(getattr(data, "shape", None))


@dataclass(frozen=True)
class Group:
    """Positions whose samples have the same shape."""

    shape: Hashable
    positions: Sequence[int]
    each: float  # what one of them costs

    @property
    def cost(self) -> float:
        """What all of them cost."""
        return len(self.positions) * self.each

    def part(self, start: int, stop: int) -> Group:
        """Some of them."""
        return Group(self.shape, self.positions[start:stop], self.each)


@dataclass(frozen=True)
class Shapes:
    """The shapes of the samples of a stream, by position."""

    data: Shaped
    order: Order

    def groups(self, positions: range) -> list[Group]:
        """The positions by shape: groups in order of their first position, positions in their own order."""
        found: dict[Hashable, tuple[list[int], list[float]]] = {}
        indices = self.order.indices(np.arange(positions.start, positions.stop)).tolist()
        for position, index in zip(positions, indices, strict=True):
            shape = self.data.shape(index)
            try:
                alike, costs = found.setdefault(shape, ([], []))
            except TypeError as error:
                raise RecipeError(
                    f"Dataset: shape({index}) returned a {type(shape).__name__}, which cannot be compared; "
                    "return something hashable, e.g. a tuple of numbers"
                ) from error
            alike.append(position)
            costs.append(self._cost(index, shape))
        return [Group(shape, tuple(alike), sum(costs) / len(costs)) for shape, (alike, costs) in found.items()]

    def _cost(self, index: int, shape: Hashable) -> float:
        cost = getattr(self.data, "cost", None)
        if cost is None:
            return _product(shape)
        found = float(cost(index))
        if not (math.isfinite(found) and found > 0):
            raise RecipeError(f"Dataset: cost({index}) returned {found}; return a positive number, 1 if in doubt")
        return found


def shapes_of(data: Any, order: Order) -> Shapes | None:
    """The shapes of the samples of a stream over `data`; None where they are all alike."""
    return Shapes(data, order) if is_shaped(data) else None


def deal(groups: Sequence[Group], world: int, micro_batch: int) -> list[list[Group | None]]:
    """The micro-batches of a global batch: for each turn, what every rank computes in it; None: nothing is left.

    Ranks walk in step (sharded weights are gathered from all of them for every micro-batch), so a turn takes as long as
    its costliest micro-batch, and a little longer. As few turns as possible would put a batch of films beside a batch
    of pictures; a few more, in which all ranks compute films at once, are often faster.
    """
    every_turn = min(group.each for group in groups)  # launching kernels, gathering weights: no more than a guess
    parts = [-(-len(group.positions) // micro_batch) for group in groups]
    costliest_first = sorted(range(len(groups)), key=lambda number: -_largest(groups[number], parts[number]))
    best, least = list[Group](), math.inf
    for number in (None, *costliest_first[:_TRIES]):
        if number is not None:  # from now on this group is for all ranks at once, and so are those before it
            parts[number] = min(-(-parts[number] // world) * world, len(groups[number].positions))
        pieces = _cut(groups, parts, world)
        turns = [piece.cost for piece in pieces[::world]]
        takes = sum(turns) + len(turns) * every_turn
        if takes < least:
            best, least = pieces, takes
    return _hand_out(best, world)


def _cut(groups: Sequence[Group], parts: Sequence[int], world: int) -> list[Group]:
    """Cuts each group into as many parts, the costliest first.

    Where ranks would have nothing to do in the last turn, the costliest pieces are cut further.
    """
    parts = list(parts)
    heap = [(-_largest(group, num), number) for number, (group, num) in enumerate(zip(groups, parts, strict=True))]
    heapq.heapify(heap)
    idle = -sum(parts) % world
    while heap and idle:
        _, number = heapq.heappop(heap)
        if parts[number] < len(groups[number].positions):
            parts[number], idle = parts[number] + 1, idle - 1
            heapq.heappush(heap, (-_largest(groups[number], parts[number]), number))
    pieces = []
    for group, num in zip(groups, parts, strict=True):
        for part in range(num):
            piece = share_of(part, num, 0, len(group.positions))
            pieces.append(group.part(piece.start, piece.stop))
    return sorted(pieces, key=lambda piece: -piece.cost)


def _largest(group: Group, parts: int) -> float:
    """What the largest of so many parts costs."""
    return -(-len(group.positions) // parts) * group.each


def _hand_out(pieces: Sequence[Group], world: int) -> list[list[Group | None]]:
    """Each turn's pieces to the ranks: the costliest to the one that has had least."""
    # Who begins changes from step to step: one rank with all the films would be slower than the others for good.
    begins = key_of(min(piece.positions[0] for piece in pieces)) % world
    had, turns = [0.0] * world, []
    for first in range(0, len(pieces), world):
        turn: list[Group | None] = [None] * world
        ranks = sorted(range(world), key=lambda rank: (had[rank], (rank - begins) % world))
        for rank, piece in zip(ranks, pieces[first : first + world], strict=False):
            turn[rank] = piece
            had[rank] += piece.cost
        turns.append(turn)
    return turns


def _product(shape: Hashable) -> float:
    numbers = shape if isinstance(shape, tuple) else (shape,)
    if not all(isinstance(number, int | float) and number > 0 for number in numbers):
        return 1.0
    return float(math.prod(numbers))
