"""Decides from heartbeats which rank hangs. The launcher's monitor and the rank's watchdog share these functions.

Ranks run in lockstep, so when one stops making progress, all of them stop. The rank furthest behind is the cause; ranks
that wait in a collective are not. A rank hangs only if it has exceeded its own limit. The others may legitimately wait
for a rank that still makes progress, or that prepares data for hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.cluster.awake_clock import AwakeClock
from unisono.cluster.hangs.heartbeat import STEP_PHASES, Beat

# Phases with equal values are not ordered, because a rank returns from `prepare` to `start`, and the phases of a step
# repeat for each micro-batch. `index_in_step` then shows which rank is ahead.
_ORDER = {"start": 0, "prepare": 0, **dict.fromkeys(STEP_PHASES, 1), "evaluate": 2, "preview": 3, "save": 4, "end": 5}


@dataclass(frozen=True)
class Limits:
    """How long a rank may go without progress, in seconds; 0 disables the limit."""

    hang_s: float
    start_s: float

    def limit_for(self, beat: Beat) -> float | None:
        """Returns the limit in this phase, or None if the phase has none."""
        if beat.phase == "prepare":  # collecting data or filling a cache may take hours
            return None
        if beat.phase in ("save", "preview", "profile", "end"):  # these phases depend on the disk or the recipe
            return max(self.hang_s, self.start_s) if self.hang_s and self.start_s else None
        return (self.start_s if beat.is_starting else self.hang_s) or None

    def setting_for(self, beat: Beat) -> str:
        """Returns the name of the setting that the limit comes from."""
        return "start_timeout" if self.limit_for(beat) == self.start_s and beat.is_starting else "hang_timeout"


@dataclass(frozen=True)
class RankStatus:
    """The last beat of a rank, and the seconds since then without progress."""

    beat: Beat
    idle_s: float
    in_collective: bool = False  # whether the rank is in a collective, according to its Python stack

    @property
    def rank(self) -> int:
        """Number of the rank."""
        return self.beat.rank

    @property
    def waits_for_peers(self) -> bool:
        """Whether the rank is at a point where ranks wait for each other."""
        return self.in_collective or self.beat.phase == "reduce"

    def exceeds(self, limits: Limits) -> bool:
        """Whether the rank has made no progress for longer than its limit."""
        limit = limits.limit_for(self.beat)
        return limit is not None and self.idle_s > limit


def furthest_behind(statuses: Sequence[RankStatus]) -> RankStatus | None:
    """Returns the rank that the others wait for: the least advanced rank, preferably one that is not waiting itself."""

    def progress(status: RankStatus) -> tuple[int, int]:
        return status.beat.step, _ORDER.get(status.beat.phase, 1)

    if not statuses:
        return None
    least = min(map(progress, statuses))
    suspects = [status for status in statuses if progress(status) == least]
    suspects = [status for status in suspects if not status.waits_for_peers] or suspects
    return min(suspects, key=lambda status: (status.beat.index_in_step, -status.idle_s, status.rank))


def hung_rank(statuses: Sequence[RankStatus], limits: Limits) -> RankStatus | None:
    """Returns the rank that hangs: the one furthest behind, if it exceeds its own limit."""
    status = furthest_behind(statuses)
    return status if status is not None and status.exceeds(limits) else None


class ProgressTracker:
    """Measures how long each rank has gone without progress, excluding time in which this process was suspended."""

    def __init__(self) -> None:
        self._last_change: dict[int, tuple[int, float]] = {}  # by rank: number of the last beat and its time
        self.clock = AwakeClock()

    def update(self, beats: Sequence[Beat], expected_s: float = 2.0) -> list[RankStatus]:
        """Returns the status of each rank; `expected_s` is the longest expected time between two calls."""
        now = self.clock.advance(expected_s)
        statuses = []
        for beat in beats:
            number, since = self._last_change.get(beat.rank, (-1, now))
            since = now if number != beat.number else since
            self._last_change[beat.rank] = (beat.number, since)
            statuses.append(RankStatus(beat, now - since))
        return statuses
