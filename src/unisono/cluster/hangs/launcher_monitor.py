"""Detects hangs from outside, in unisono's launcher.

The elastic agent's monitor loop (`Agent._monitor_workers` in `launch/agent.py`, ten times per second) calls
`HangMonitor.check` while all ranks of its machine are alive. `check` reads the ranks' heartbeats from the job folder.
If the rank furthest behind has exceeded its limit, `check` takes the Python stacks of all ranks by a signal, saves them
in the run folder and returns the hang. The agent then treats that rank as if it had died: it kills all ranks and
restarts them. `warm_ranks.py` uses the same class for the short runs of `unisono verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from unisono.cluster.hangs.diagnosis import Limits, ProgressTracker, hung_rank
from unisono.cluster.hangs.heartbeat import last_beats
from unisono.cluster.hangs.report import Hang, describe
from unisono.cluster.hangs.stacks import is_debugged, is_in_collective, main_thread, save_stacks, take_stacks
from unisono.cluster.outcome import Outcome

_RECHECK_S = 10.0  # seconds before stacks are taken again, if a rank that seemed to hang has made progress after all


class HangMonitor:
    """Watches the ranks of one attempt on this machine."""

    def __init__(
        self, job_folder: Path, limits: Limits, run_folder: Path | None, print_line: Callable[[str], None]
    ) -> None:
        """Stacks are saved in `run_folder`. `print_line` receives a message while the decision is pending."""
        self._job_folder, self._limits, self._run_folder = job_folder, limits, run_folder
        self._print_line = print_line
        self._tracker = ProgressTracker()
        self._recheck_s = min(limit for limit in (limits.hang_s, limits.start_s, _RECHECK_S) if limit)
        self._next_check = 0.0

    def check(self, pids: Mapping[int, int], *, attempt: int, other_machines: bool) -> Hang | None:
        """Returns the hang among the ranks with these process ids, or None if no rank hangs."""
        statuses = self._tracker.update(last_beats(self._job_folder, pids))
        if hung_rank(statuses, self._limits) is None or self._tracker.clock.now < self._next_check:
            return None
        # Take stacks only after the heartbeats show a hang, because taking them interrupts the ranks. Inside FSDP's
        # forward pass, only the stack shows which rank waits for the others.
        stacks = take_stacks(self._job_folder, pids)
        statuses = [replace(each, in_collective=is_in_collective(main_thread(stacks[each.rank]))) for each in statuses]
        status = hung_rank(statuses, self._limits)
        if status is None or is_debugged(main_thread(stacks[status.rank])):
            self._next_check = self._tracker.clock.now + self._recheck_s
            return None
        limit = self._limits.limit_for(status.beat) or 0.0
        if status.waits_for_peers and other_machines and status.idle_s < 2 * limit:
            # The rank that caused the hang may run on another machine, and only that machine's launcher can name it.
            self._next_check = self._tracker.clock.now + limit
            rank = Outcome("crashed", describe(status), status.rank, status.beat.step or None)
            self._print_line(f"{rank.describe()}; giving the other machines time to find the cause")
            return None
        note = save_stacks(self._run_folder, status.beat.step, attempt, stacks)
        return Hang(status, self._limits, main_thread(stacks[status.rank]), stacks_note=note)
