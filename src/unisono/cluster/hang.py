"""Who hangs: told from the pulses of the ranks.

Ranks go in lockstep, so when one stands still all do. The one to blame is the one that is least far; those that only
wait in a collective are not. And it is a hang only when that one has stood still for longer than it may: a rank that
still makes progress, or prepares data for hours, may be waited for.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.cluster.pulse import STEP_PHASES, Beat, read_pulses

# After prepare a rank is at the start again, and in a step phases come again: there the place tells who is farther.
_ORDER = {"start": 0, "prepare": 0, **dict.fromkeys(STEP_PHASES, 1), "evaluate": 2, "preview": 3, "save": 4, "end": 5}
_PAUSE_S = 10.0  # whoever looks on was itself not running for so long (a suspended machine): nobody is to blame


@dataclass(frozen=True)
class Limits:
    """How long a rank may stand still, in seconds; 0 is for ever."""

    hang_s: float
    start_s: float

    def of(self, beat: Beat) -> float | None:
        """The limit at this point of a run; None: as long as it likes."""
        if beat.phase == "prepare":  # collecting data or filling a cache may take hours
            return None
        if beat.phase in ("save", "preview", "end"):  # a disk's or a recipe's own pace, not a step's
            return max(self.hang_s, self.start_s) if self.hang_s and self.start_s else None
        return (self.start_s if beat.is_starting else self.hang_s) or None

    def name_of(self, beat: Beat) -> str:
        """The setting that the limit comes from."""
        return "start_timeout" if self.of(beat) == self.start_s and beat.is_starting else "hang_timeout"


@dataclass(frozen=True)
class Stand:
    """A rank, where it was last seen, and for how long it has stood still there."""

    beat: Beat
    seconds: float
    waits: bool = False  # its stack shows that it waits for others

    @property
    def rank(self) -> int:
        """The rank."""
        return self.beat.rank

    @property
    def only_waits(self) -> bool:
        """Whether it is in a place where ranks wait for others."""
        return self.waits or self.beat.phase == "reduce"

    def is_over(self, limits: Limits) -> bool:
        """Whether it has stood still for longer than it may."""
        limit = limits.of(self.beat)
        return limit is not None and self.seconds > limit

    def where(self) -> str:
        """Which rank, and which step once there is one."""
        return f"rank {self.rank}, step {self.beat.step}" if self.beat.step else f"rank {self.rank}"

    def describe(self) -> str:
        """What to tell the user, without the rank and the step."""
        waits = ", waiting for other ranks" if self.only_waits else ""
        return f"no progress for {self.seconds:.0f} s in {_named(self.beat.phase)}{waits}"


def culprit(stands: Sequence[Stand]) -> Stand | None:
    """The rank that the others wait for: the least far, and among equals one that does not itself wait for others."""

    def how_far(stand: Stand) -> tuple[int, int]:
        return stand.beat.step, _ORDER.get(stand.beat.phase, 1)

    if not stands:
        return None
    least = min(map(how_far, stands))
    suspects = [stand for stand in stands if how_far(stand) == least]
    suspects = [stand for stand in suspects if not stand.only_waits] or suspects
    return min(suspects, key=lambda stand: (stand.beat.place, -stand.seconds, stand.rank))


class Onlooker:
    """Remembers when each rank's pulse was last seen to move, by a clock of its own."""

    def __init__(self) -> None:
        self._moved: dict[int, tuple[int, float]] = {}  # by rank: number of the beat, when it was first seen
        self._looked = time.monotonic()

    def look(self, beats: Sequence[Beat]) -> list[Stand]:
        """How long each rank has stood still."""
        now = time.monotonic()
        paused = now - self._looked if now - self._looked > _PAUSE_S else 0.0
        self._looked = now
        stands = []
        for beat in beats:
            number, since = self._moved.get(beat.rank, (-1, now))
            since = now if number != beat.number else since + paused
            self._moved[beat.rank] = (beat.number, since)
            stands.append(Stand(beat, now - since))
        return stands


def beats_of(job_folder: Path, ranks: Collection[int]) -> list[Beat]:
    """The last beat of each of these ranks; one that has none yet is starting."""
    found = {beat.rank: beat for beat in read_pulses(job_folder)}
    return [found.get(rank, Beat(rank, "start", 0, 0, 0.0)) for rank in sorted(ranks)]


def _named(phase: str) -> str:
    if phase in ("start", "end"):
        return f"the {phase}"
    return phase
