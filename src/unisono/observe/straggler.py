"""Which rank holds up the others.

Ranks go in lockstep: the time of a step is the same on all of them, and the slowest sets it. What tells ranks apart is
the time each needs itself, before it waits. A rank that needs steadily more than the others is named; one bad interval
(another program, a file that was not in memory) is not worth a word.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

SLOWER = 1.2
"""So many times as long as the middle one of the others makes a straggler."""
INTERVALS = 3
"""It takes so many logged intervals in a row,"""
STEADY_S = 3.0
"""and so many seconds: intervals may be a few milliseconds long."""
EVERY_S = 60.0
"""At most one word in so many seconds."""
_NOISE_MS = 1.0  # below this, twice as long is nothing to talk about


@dataclass(frozen=True)
class Straggler:
    """A rank that holds up the others."""

    rank: int
    own_ms: float
    others_ms: float  # what the middle one of the others needs
    reason: str  # "data" or "compute"

    @property
    def slower_percent(self) -> int:
        """How much longer than the others it takes."""
        return round((self.own_ms / self.others_ms - 1) * 100) if self.others_ms else 0

    def describe(self) -> str:
        """One line for the user."""
        why = "waits longer for its data" if self.reason == "data" else "computes longer"
        return (
            f"rank {self.rank} holds up the others: {self.own_ms:.1f} ms a step, the others {self.others_ms:.1f} ms "
            f"({self.slower_percent} % slower; it {why})"
        )


class Stragglers:
    """Remembers how often in a row each rank was slower than the others."""

    def __init__(self) -> None:
        self._in_a_row: dict[int, int] = {}
        self._since: dict[int, float] = {}
        self._told_at: float | None = None

    def look(self, own_ms: Sequence[float], data_wait_ms: Sequence[float]) -> Straggler | None:
        """The straggler to talk about now, from each rank's own time in one interval, and the wait for data in it."""
        worst: Straggler | None = None
        now = time.monotonic()
        for rank in range(len(own_ms)):
            found = _compare(rank, own_ms, data_wait_ms)
            if found is None:
                self._in_a_row[rank] = 0
                continue
            self._in_a_row[rank] = self._in_a_row.get(rank, 0) + 1
            if self._in_a_row[rank] == 1:
                self._since[rank] = now
            steady = self._in_a_row[rank] >= INTERVALS and now - self._since[rank] >= STEADY_S
            if steady and (worst is None or found.own_ms > worst.own_ms):
                worst = found
        if worst is None or (self._told_at is not None and now - self._told_at < EVERY_S):
            return None
        self._told_at = now
        return worst


def _compare(rank: int, own_ms: Sequence[float], data_wait_ms: Sequence[float]) -> Straggler | None:
    """This rank if it is slower than the others in this interval."""
    others = [other for other in range(len(own_ms)) if other != rank]
    if not others:
        return None
    middle = statistics.median(own_ms[other] for other in others)
    more_ms = own_ms[rank] - middle
    if own_ms[rank] <= SLOWER * middle or more_ms < _NOISE_MS:
        return None
    waits_more_ms = data_wait_ms[rank] - statistics.median(data_wait_ms[other] for other in others)
    return Straggler(rank, own_ms[rank], middle, "data" if waits_more_ms > more_ms / 2 else "compute")
