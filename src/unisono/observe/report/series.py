"""A number over the steps of a run, in bounded memory.

A run of a million lines is drawn with as many points as a screen can show. What a reader must not miss are the peaks,
so neighbours go together into buckets that remember their lowest and their highest value, and the mean as the trend.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

LIMIT = 2000
"""Points that a series gives at most."""

Point = tuple[float, float]
_WAITING = 4096
_LARGEST = 1e300  # beyond it, the difference of two values is no longer a number
_SMALLEST = 1e-290  # below it, a part of a value may be 0


def number(value: object) -> float | None:
    """The value if it is a number that can be drawn, None otherwise ("nan", text, a truth value)."""
    # By type, not isinstance: a truth value is an int to the latter, and this is asked millions of times.
    if (type(value) is float or type(value) is int) and -_LARGEST < value < _LARGEST:  # nan is between nothing
        return value if value > _SMALLEST or value < -_SMALLEST else 0.0
    return None


class _Bucket:
    """Values next to each other, put together."""

    __slots__ = ("count", "high", "low", "x_high", "x_low", "x_total", "y_total")

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.low, self.high = min(ys), max(ys)
        self.x_low, self.x_high = xs[ys.index(self.low)], xs[ys.index(self.high)]
        self.x_total, self.y_total, self.count = sum(xs), sum(ys), len(ys)

    def take(self, other: _Bucket) -> None:
        if other.low < self.low:
            self.low, self.x_low = other.low, other.x_low
        if other.high > self.high:
            self.high, self.x_high = other.high, other.x_high
        self.x_total += other.x_total
        self.y_total += other.y_total
        self.count += other.count


class Series:
    """A number over the steps of a run; however many values are added, at most `limit` points come out."""

    def __init__(self, points: Iterable[Point] = (), limit: int = LIMIT) -> None:
        self._limit = max((limit - 2) // 2, 2)  # each bucket gives two points; the first and the last value are kept
        self._buckets: list[_Bucket] = []
        self._stride = 1
        # Values wait here until there are many: a million of them one by one would take a minute.
        self._xs: list[float] = []
        self._ys: list[float] = []
        self._ends: list[Point] = []
        self.gaps = 0
        """Values that were no numbers (nan, inf)."""
        for x, y in points:
            self.add(x, y)

    def add(self, x: float, y: float) -> None:
        """Adds the value of a step."""
        self._xs.append(x)
        self._ys.append(y)
        if len(self._xs) >= _WAITING and len(self._xs) >= self._stride:
            self._sort_in()

    def take(self, x: float, value: object) -> None:
        """Adds what stands in a file, if it is a number; counts it otherwise."""
        y = number(value)
        if y is None:
            self.gaps += 1
        else:
            self.add(x, y)

    def _sort_in(self) -> None:
        """Puts the values that wait into buckets."""
        xs, ys, done = self._xs, self._ys, 0
        if not xs:
            return
        first = self._ends[0] if self._ends else (xs[0], ys[0])
        self._ends = [first, (xs[-1], ys[-1])]
        while done < len(xs):
            if len(self._buckets) >= self._limit:
                for left, right in zip(self._buckets[::2], self._buckets[1::2], strict=False):
                    left.take(right)
                self._buckets, self._stride = self._buckets[::2], self._stride * 2
            end = done + self._stride
            self._buckets.append(_Bucket(xs[done:end], ys[done:end]))
            done = end
        del xs[:done], ys[:done]

    def _settled(self) -> list[_Bucket]:
        self._sort_in()
        return self._buckets

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(bucket.count for bucket in self._settled())

    @property
    def first(self) -> Point | None:
        """The oldest value."""
        return self._ends[0] if self._settled() else None

    @property
    def last(self) -> Point | None:
        """The newest value."""
        return self._ends[-1] if self._settled() else None

    @property
    def lowest(self) -> float:
        """The lowest value."""
        return min((bucket.low for bucket in self._settled()), default=math.nan)

    @property
    def highest(self) -> float:
        """The highest value."""
        return max((bucket.high for bucket in self._settled()), default=math.nan)

    @property
    def mean(self) -> float:
        """The mean of all values."""
        return sum(bucket.y_total for bucket in self._settled()) / self.count if self._settled() else math.nan

    def points(self) -> list[Point]:
        """The values, or where there are too many the lowest and the highest of every few."""
        buckets = self._settled()
        return sorted({*self._ends, *((b.x_low, b.low) for b in buckets), *((b.x_high, b.high) for b in buckets)})

    def trend(self) -> list[Point]:
        """A running mean over a twentieth of the series.

        Towards the beginning, where the loss falls steeply, the window shrinks so that the mean does not run ahead.
        """
        means = sorted((b.x_total / b.count, b.y_total / b.count) for b in self._settled())
        sums = [0.0]
        for _, y in means:
            sums.append(sums[-1] + y)
        trend, reach = [], max(len(means) // 40, 1)
        for i, (x, _) in enumerate(means):
            begin, end = i - min(reach, i), min(i + min(reach, i) + 1, len(means))
            trend.append((x, (sums[end] - sums[begin]) / (end - begin)))
        return trend


class Curves:
    """A metric that is a whole curve each time: the newest, and a few of the older ones evenly over the run."""

    def __init__(self, limit: int = 12) -> None:
        self._limit = limit
        self._stride = 1
        self._seen = 0
        self._older: list[tuple[float, Series]] = []
        self.newest: tuple[float, Series] | None = None

    def add(self, step: float, values: Iterable[object]) -> None:
        """Adds the curve of a step; its values are counted from 1."""
        curve = Series()
        for index, value in enumerate(values, 1):
            curve.take(index, value)
        if not curve.count:
            return
        if self.newest is not None:
            if self._seen % self._stride == 0:
                self._older.append(self.newest)
            self._seen += 1
            if len(self._older) >= 2 * self._limit:
                self._older, self._stride = self._older[::2], self._stride * 2
        self.newest = step, curve

    def older(self) -> list[tuple[float, Series]]:
        """Older curves with their steps, oldest first."""
        every = -(-len(self._older) // self._limit) if self._older else 1
        return self._older[::every]
