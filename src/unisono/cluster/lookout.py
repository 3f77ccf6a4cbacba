"""The launcher looks out for ranks of its machine that hang.

It reads their pulses; when the rank that is least far has stood still for too long, it takes the stacks of all, keeps
them in the run's folder, and says whom to blame. What the launcher then does is the same as after a death.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.cluster.hang import Limits, Onlooker, Stand, beats_of, culprit
from unisono.cluster.outcome import Outcome
from unisono.cluster.stacks import is_debugged, keep_stacks, main_thread, take_stacks, waits_for_others

_AGAIN_S = 10.0  # after a rank that seemed to hang has moved, before stacks are taken again


@dataclass(frozen=True)
class Hang:
    """A rank that hangs: as the outcome of that rank, and as an event of the run."""

    outcome: Outcome
    details: Mapping[str, Any]


class Lookout:
    """Looks at the ranks of one attempt."""

    def __init__(self, job_folder: Path, limits: Limits, run_folder: Path | None, say: Callable[[str], None]) -> None:
        """Stacks are kept in `run_folder`; `say` tells the user something before it is decided."""
        self._job_folder, self._limits, self._run_folder, self._say = job_folder, limits, run_folder, say
        self._onlooker = Onlooker()
        self._patient_until = 0.0

    def find(self, pids: Mapping[int, int], *, attempt: int, other_machines: bool) -> Hang | None:
        """The rank, of those with these process ids, that hangs; None as long as none does."""
        stands = self._onlooker.look(beats_of(self._job_folder, pids))
        least = culprit(stands)
        if least is None or not least.is_over(self._limits) or time.monotonic() < self._patient_until:
            return None
        stacks = take_stacks(self._job_folder, pids)
        # Only now, because it interrupts the ranks: in fsdp's forward pass, say, it is the stacks that tell who waits.
        stands = [replace(stand, waits=waits_for_others(main_thread(stacks[stand.rank]))) for stand in stands]
        least = culprit(stands)
        assert least is not None
        limit = self._limits.of(least.beat) or 0.0
        if not least.is_over(self._limits) or is_debugged(main_thread(stacks[least.rank])):
            self._patient_until = time.monotonic() + min(limit, _AGAIN_S)
            return None
        if least.only_waits and other_machines and least.seconds < 2 * limit:
            self._patient_until = time.monotonic() + limit
            self._say(f"{least.where()}: {least.describe()}; giving the other machines time to find out whom")
            return None
        return self._hang(least, limit, stacks, attempt)

    def _hang(self, stand: Stand, limit: float, stacks: Mapping[int, str], attempt: int) -> Hang:
        beat = stand.beat
        message = f"{stand.describe()} ({self._limits.name_of(beat)} {limit:g})"
        if self._run_folder is not None:
            message += "; " + keep_stacks(self._run_folder, f"step_{beat.step:08d}-attempt{attempt}", stacks)
        stack = [f"stack of rank {beat.rank}, innermost call first:", *main_thread(stacks[beat.rank])]
        details = {"step": beat.step, "rank": beat.rank, "phase": beat.phase, "seconds": round(stand.seconds)}
        return Hang(Outcome("crashed", message, beat.rank, beat.step or None, "\n".join(stack)), details)
