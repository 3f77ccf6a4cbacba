"""Stores a metric over the steps of a run in bounded memory.

Even a run of a million lines is drawn with no more points than a screen can show. Peaks must stay visible, so
neighbouring values are combined into buckets that store their lowest and highest value, and their mean for the trend.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

LIMIT = 2000
"""Maximum number of points of a series."""

Point = tuple[float, float]
_MAX_PENDING = 4096
_LARGEST = 1e300  # the difference of two larger values may overflow
_SMALLEST = 1e-290  # a fraction of a smaller value may underflow to 0


def number(value: object) -> float | None:
    """Returns a value if it is a number that can be drawn; None for "nan", other text or a bool."""
    # Use type() instead of isinstance, because a bool is an instance of int and type() is faster in millions of calls.
    if (type(value) is float or type(value) is int) and -_LARGEST < value < _LARGEST:  # false for nan
        return value if value > _SMALLEST or value < -_SMALLEST else 0.0
    return None


class _Bucket:
    """A summary of neighbouring values."""

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
    """A metric over the steps of a run. It has at most `limit` points, however many values are added."""

    def __init__(self, points: Iterable[Point] = (), limit: int = LIMIT) -> None:
        self._limit = max((limit - 2) // 2, 2)  # a bucket has two points; the first and the last value are separate
        self._buckets: list[_Bucket] = []
        self._stride = 1
        # Collect values in lists first, because adding a million values to buckets one by one would take a minute.
        self._xs: list[float] = []
        self._ys: list[float] = []
        self._ends: list[Point] = []
        self.gaps = 0
        """Number of values that were not finite."""
        for x, y in points:
            self.add(x, y)

    def add(self, x: float, y: float) -> None:
        """Adds the value of a step."""
        self._xs.append(x)
        self._ys.append(y)
        if len(self._xs) >= _MAX_PENDING and len(self._xs) >= self._stride:
            self._fill_buckets()

    def take(self, x: float, value: object) -> None:
        """Adds a value from a file if it is a finite number; otherwise counts it as a gap."""
        y = number(value)
        if y is None:
            self.gaps += 1
        else:
            self.add(x, y)

    def _fill_buckets(self) -> None:
        """Moves the collected values into buckets."""
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

    def _all_buckets(self) -> list[_Bucket]:
        self._fill_buckets()
        return self._buckets

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(bucket.count for bucket in self._all_buckets())

    @property
    def first(self) -> Point | None:
        """The oldest value."""
        return self._ends[0] if self._all_buckets() else None

    @property
    def last(self) -> Point | None:
        """The newest value."""
        return self._ends[-1] if self._all_buckets() else None

    @property
    def lowest(self) -> float:
        """The lowest value."""
        return min((bucket.low for bucket in self._all_buckets()), default=math.nan)

    @property
    def highest(self) -> float:
        """The highest value."""
        return max((bucket.high for bucket in self._all_buckets()), default=math.nan)

    @property
    def mean(self) -> float:
        """The mean of all values."""
        return sum(bucket.y_total for bucket in self._all_buckets()) / self.count if self._all_buckets() else math.nan

    def points(self) -> list[Point]:
        """Returns the values or, if there are too many, the lowest and the highest of each bucket."""
        buckets = self._all_buckets()
        return sorted({*self._ends, *((b.x_low, b.low) for b in buckets), *((b.x_high, b.high) for b in buckets)})

    def trend(self) -> list[Point]:
        """Returns a running mean over a twentieth of the series.

        The window shrinks towards the beginning. The loss falls steeply there, and a wide window would lower the mean.
        """
        means = sorted((b.x_total / b.count, b.y_total / b.count) for b in self._all_buckets())
        sums = [0.0]
        for _, y in means:
            sums.append(sums[-1] + y)
        trend, reach = [], max(len(means) // 40, 1)
        for i, (x, _) in enumerate(means):
            begin, end = i - min(reach, i), min(i + min(reach, i) + 1, len(means))
            trend.append((x, (sums[end] - sums[begin]) / (end - begin)))
        return trend


class Curves:
    """A metric that is a curve at each evaluation. Stores the newest curve and some older ones, spread over the run."""

    def __init__(self, limit: int = 12) -> None:
        self._limit = limit
        self._stride = 1
        self._num_added = 0
        self._older: list[tuple[float, Series]] = []
        self.newest: tuple[float, Series] | None = None

    def add(self, step: float, values: Iterable[object]) -> None:
        """Adds the curve of a step. The x coordinates of its values are 1, 2, 3 and so on."""
        curve = Series()
        for index, value in enumerate(values, 1):
            curve.take(index, value)
        if not curve.count:
            return
        if self.newest is not None:
            if self._num_added % self._stride == 0:
                self._older.append(self.newest)
            self._num_added += 1
            if len(self._older) >= 2 * self._limit:
                self._older, self._stride = self._older[::2], self._stride * 2
        self.newest = step, curve

    def older(self) -> list[tuple[float, Series]]:
        """Returns older curves with their steps, oldest first."""
        every = -(-len(self._older) // self._limit) if self._older else 1
        return self._older[::every]
