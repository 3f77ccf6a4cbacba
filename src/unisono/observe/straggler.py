"""Detects the rank that slows down all others.

Ranks run in lockstep, so a step takes as long on all of them as on the slowest rank. The detector compares the time
that each rank itself needs, without its waits for the others. It reports a rank that is slower in several consecutive
logged intervals. A single slow interval, caused by another program or a file that was not cached, is ignored.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

SLOWER = 1.2
"""A rank is slow if it takes this many times the median time of the other ranks."""
INTERVALS = 3
"""Number of consecutive logged intervals for which a rank must be slow to be a straggler."""
STEADY_S = 3.0
"""Number of seconds for which a rank must also be slow, because an interval may last only a few milliseconds."""
EVERY_S = 60.0
"""Seconds between two reports."""
_NOISE_MS = 1.0  # milliseconds; smaller differences are ignored


@dataclass(frozen=True)
class Straggler:
    """A rank that slows down the others."""

    rank: int
    own_ms: float
    others_ms: float  # median of the other ranks
    reason: str  # "data" or "compute"

    @property
    def slower_percent(self) -> int:
        """By how many percent the rank is slower than the others."""
        return round((self.own_ms / self.others_ms - 1) * 100) if self.others_ms else 0

    def describe(self) -> str:
        """Describes the straggler in one line for the user."""
        why = "waits longer for its data" if self.reason == "data" else "computes longer"
        return (
            f"rank {self.rank} slows down the others: it needs {self.own_ms:.1f} ms per step, the others "
            f"{self.others_ms:.1f} ms ({self.slower_percent} % slower; it {why})"
        )


class StragglerDetector:
    """Counts for each rank the consecutive intervals in which it was slower than the others."""

    def __init__(self) -> None:
        self._in_a_row: dict[int, int] = {}
        self._since: dict[int, float] = {}
        self._reported_at: float | None = None

    def check(self, own_ms: Sequence[float], data_wait_ms: Sequence[float]) -> Straggler | None:
        """Returns the straggler to report now, given each rank's own time and wait for data in one interval."""
        worst: Straggler | None = None
        now = time.monotonic()
        if len(own_ms) < 2:
            return None
        own_medians, wait_medians = medians_of_others(own_ms), medians_of_others(data_wait_ms)
        for rank in range(len(own_ms)):
            straggler = _compare(rank, own_ms[rank], own_medians[rank], data_wait_ms[rank] - wait_medians[rank])
            if straggler is None:
                self._in_a_row[rank] = 0
                continue
            self._in_a_row[rank] = self._in_a_row.get(rank, 0) + 1
            if self._in_a_row[rank] == 1:
                self._since[rank] = now
            steady = self._in_a_row[rank] >= INTERVALS and now - self._since[rank] >= STEADY_S
            if steady and (worst is None or straggler.own_ms > worst.own_ms):
                worst = straggler
        if worst is None or (self._reported_at is not None and now - self._reported_at < EVERY_S):
            return None
        self._reported_at = now
        return worst


def _compare(rank: int, own_ms: float, median: float, waits_more_ms: float) -> Straggler | None:
    """Returns this rank as a straggler if it is slower than the others in this interval."""
    more_ms = own_ms - median
    if own_ms <= SLOWER * median or more_ms < _NOISE_MS:
        return None
    return Straggler(rank, own_ms, median, "data" if waits_more_ms > more_ms / 2 else "compute")


def medians_of_others(values: Sequence[float]) -> list[float]:
    """Returns for each rank the median of all other ranks' values. Sorts the values only once; needs at least two."""
    ordered = sorted(values)
    num = len(ordered) - 1
    low, high = (num - 1) // 2, num // 2

    def without(position: int) -> float:
        first, second = (ordered[place if place < position else place + 1] for place in (low, high))
        return (first + second) / 2

    return [without(bisect_left(ordered, value)) for value in values]
