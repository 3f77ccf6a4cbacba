"""Forms micro-batches of equal shape from a dataset with samples of several shapes.

The samples of a global batch are grouped by shape, and the groups are split into micro-batches and assigned to ranks.
No sample moves to another global batch, and positions keep their seeds and noise. The assignment is a pure function of
the dataset, the order and the position of the global batch, so every rank and every loader worker can compute it.
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

_MOST_SPREAD = 8  # number of groups, most expensive first, that `deal` tries to spread across all ranks


class Shaped(Protocol):
    """A map-style dataset in which only samples of the same shape can form a batch.

    It may also have `cost(index) -> float`: the work and memory of a sample relative to others. The default is the
    product of its shape, or 1 if the shape does not consist of numbers.
    """

    def shape(self, index: int) -> Hashable:
        """Returns the shape of a sample without reading the sample. Samples with equal shapes can form a batch."""


def is_shaped(data: Any) -> TypeIs[Shaped]:
    """Whether a dataset defines the shapes of its samples. A tensor does not, because its `shape` is not callable."""
    return callable(getattr(data, "shape", None))


@dataclass(frozen=True)
class Group:
    """Positions of samples with the same shape."""

    shape: Hashable
    positions: Sequence[int]
    each: float  # mean cost of a sample

    @property
    def cost(self) -> float:
        """The cost of all samples."""
        return len(self.positions) * self.each

    def part(self, start: int, stop: int) -> Group:
        """Returns the group with only the positions start..stop-1."""
        return Group(self.shape, self.positions[start:stop], self.each)


@dataclass(frozen=True)
class Shapes:
    """The shapes of the samples of a stream, by position."""

    data: Shaped
    order: Order

    def groups(self, positions: range) -> list[Group]:
        """Groups positions by the shape of their samples. Groups are in order of their first position."""
        by_shape: dict[Hashable, tuple[list[int], list[float]]] = {}
        indices = self.order.indices(np.arange(positions.start, positions.stop)).tolist()
        for position, index in zip(positions, indices, strict=True):
            shape = self.data.shape(index)
            try:
                alike, costs = by_shape.setdefault(shape, ([], []))
            except TypeError as error:
                raise RecipeError(
                    f"Dataset: shape({index}) returned a {type(shape).__name__}, which is not hashable; "
                    "return for instance a tuple of numbers"
                ) from error
            alike.append(position)
            costs.append(cost_of(self.data, index, shape))
        return [Group(shape, tuple(alike), sum(costs) / len(costs)) for shape, (alike, costs) in by_shape.items()]


def cost_of(data: Shaped, index: int, shape: Hashable) -> float:
    """Returns the relative work and memory of a sample with this shape."""
    cost = getattr(data, "cost", None)
    if cost is None:
        return _product(shape)
    value = float(cost(index))
    if not (math.isfinite(value) and value > 0):
        raise RecipeError(f"Dataset: cost({index}) returned {value}; return a positive number, 1 if in doubt")
    return value


def shapes_of(data: Any, order: Order) -> Shapes | None:
    """Returns the shapes of the samples of a stream over `data`; None if the dataset does not define shapes."""
    return Shapes(data, order) if is_shaped(data) else None


def deal(groups: Sequence[Group], world: int, micro_batch: int) -> list[list[Group | None]]:
    """Forms the micro-batches of a global batch. Returns a list of turns, each with one micro-batch or None per rank.

    Ranks run in lockstep, because sharded weights are gathered for every micro-batch. So a turn takes as long as its
    costliest micro-batch, plus an overhead. With as few turns as possible, ranks that compute images would wait for
    ranks that compute videos. A few more turns, in which all ranks compute videos, are often faster.
    """
    overhead = min(group.each for group in groups)  # rough estimate of kernel launches and weight gathering in a turn
    parts = [-(-len(group.positions) // micro_batch) for group in groups]
    costliest_first = sorted(range(len(groups)), key=lambda number: -_largest(groups[number], parts[number]))
    best, least = list[Group](), math.inf
    for number in (None, *costliest_first[:_MOST_SPREAD]):
        if number is not None:  # spreads this group, and all groups before it in this loop, across all ranks
            parts[number] = min(-(-parts[number] // world) * world, len(groups[number].positions))
        pieces = _split(groups, parts, world)
        turns = [piece.cost for piece in pieces[::world]]
        cost = sum(turns) + len(turns) * overhead
        if cost < least:
            best, least = pieces, cost
    return _assign(best, world)


def _split(groups: Sequence[Group], parts: Sequence[int], world: int) -> list[Group]:
    """Splits each group into the given number of parts and returns the pieces, costliest first.

    If ranks would be idle in the last turn, the groups with the costliest pieces are split into more parts.
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
    """Returns the cost of the largest of `parts` parts of a group."""
    return -(-len(group.positions) // parts) * group.each


def _assign(pieces: Sequence[Group], world: int) -> list[list[Group | None]]:
    """Assigns the pieces of each turn to ranks: the costliest piece to the rank with the lowest cost so far."""
    # The first rank changes from step to step. Otherwise one rank would always get the most expensive samples.
    first_rank = key_of(min(piece.positions[0] for piece in pieces)) % world
    costs, turns = [0.0] * world, []
    for first in range(0, len(pieces), world):
        turn: list[Group | None] = [None] * world
        ranks = sorted(range(world), key=lambda rank: (costs[rank], (rank - first_rank) % world))
        for rank, piece in zip(ranks, pieces[first : first + world], strict=False):
            turn[rank] = piece
            costs[rank] += piece.cost
        turns.append(turn)
    return turns


def _product(shape: Hashable) -> float:
    numbers = shape if isinstance(shape, tuple) else (shape,)
    if not all(isinstance(number, int | float) and number > 0 for number in numbers):
        return 1.0
    return float(math.prod(numbers))
