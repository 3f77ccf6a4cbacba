"""Summarises repeated measurements: median, quartiles, and a confidence interval of the median."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """The median of several measurements and their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Computes the spread of one or more values."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high)


@dataclass(frozen=True)
class MedianInterval:
    """A median and an interval that contains the true median with probability `confidence`."""

    median: float
    low: float
    high: float
    confidence: float

    @classmethod
    def of(cls, values: Sequence[float]) -> MedianInterval:
        """Computes the interval from the sorted values, without assumptions about their distribution.

        Both ends are values: the number of values below the true median is binomially distributed. With fewer than 6
        values, even their whole range has a confidence below 95 %, which `confidence` states.
        """
        ordered, num = sorted(values), len(values)
        cut, tail = 0, 0.5**num  # probability that at most `cut` values are below the true median
        while (more := tail + math.comb(num, cut + 1) * 0.5**num) <= (1 - _CONFIDENCE) / 2:
            cut, tail = cut + 1, more
        return cls(statistics.median(ordered), ordered[cut], ordered[num - 1 - cut], max(0.0, 1 - 2 * tail))
