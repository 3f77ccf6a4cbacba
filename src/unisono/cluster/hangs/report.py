"""Describes a hang for the user, the event log and the rank's outcome. Both hang detectors use this module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unisono.cluster.hangs.diagnosis import Limits, RankStatus
from unisono.cluster.outcome import Outcome


@dataclass(frozen=True)
class Hang:
    """A hang, described by the rank that caused it."""

    status: RankStatus
    limits: Limits
    calls: Sequence[str]
    """Python frames of the rank's main thread, innermost call first; empty if its stack could not be taken."""
    is_silent: bool = False
    """Whether the rank's watchdog thread does not respond either."""
    stacks_note: str = ""
    """The end of the message, which says where the stacks of all ranks are saved."""

    def event(self) -> dict[str, Any]:
        """Returns the details of the event `hang` in events.jsonl."""
        beat = self.status.beat
        return {"step": beat.step, "rank": beat.rank, "phase": beat.phase, "seconds": round(self.status.idle_s)}

    def outcome(self) -> Outcome:
        """Returns the outcome of the rank: crashed, with its stack as the traceback."""
        beat = self.status.beat
        if self.is_silent:
            message = (
                f"no response for {self.status.idle_s:.0f} s (stopped, killed, disconnected, or in a call that holds "
                "python's GIL)"
            )
        else:
            limit = self.limits.limit_for(beat) or 0.0
            message = f"{describe(self.status)} ({self.limits.setting_for(beat)} {limit:g})"
        header = f"stack of rank {beat.rank}, innermost call first:"
        stack = "\n".join([header, *self.calls]) if self.calls else ""
        return Outcome("crashed", message + self.stacks_note, beat.rank, beat.step or None, stack)


def describe(status: RankStatus) -> str:
    """Returns a phrase such as "no progress for 60 s in reduce, waiting for other ranks"."""
    phase = {"start": "startup", "end": "shutdown"}.get(status.beat.phase, status.beat.phase)
    waiting = ", waiting for other ranks" if status.waits_for_peers else ""
    return f"no progress for {status.idle_s:.0f} s in {phase}{waiting}"
