"""The heartbeat of a rank records which phase of which step the rank last entered, and when.

The training loop calls `Heartbeat.at` at every phase of a step. The call writes one record to a small memory-mapped
file in the job folder. The launcher can read the file even if the rank hangs, was killed or holds the GIL. A call takes
about a microsecond and synchronises with neither the GPU nor another rank. Faults of `--inject` (`unisono.faults`)
happen at the same points.
"""

from __future__ import annotations

import mmap
import re
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from unisono.faults import Injector

_LAYOUT = struct.Struct("<dqqqq24s")  # wall clock, step, number of the beat, index in the step, first step, phase
_FILE = re.compile(r"heartbeat_rank(\d+)")

STEP_PHASES = ("data", "forward", "backward", "reduce", "optimizer")
"""The phases of a step in order. The first three repeat for each micro-batch. In `reduce`, a rank waits for others."""


@dataclass(frozen=True)
class Beat:
    """One record of a heartbeat: the step and phase of a rank at a point in time."""

    rank: int
    phase: str
    step: int  # the step in progress, from 1; 0 before the first
    number: int  # increases with every beat; if it does not change, the rank makes no progress
    time: float  # wall clock
    index_in_step: int = 0  # counts the beats of this step; all ranks send the same sequence
    first_step: int = 0  # number of the first step since this process started; 0 before that step

    @property
    def is_starting(self) -> bool:
        """Whether the rank has not finished its first step, which may include compilation."""
        return self.first_step == 0 or self.step <= self.first_step


class Heartbeat:
    """Records the progress of this rank. Only the training thread calls `at`."""

    def __init__(self, rank: int = 0, folder: Path | None = None, injector: Injector | None = None) -> None:
        """`folder` is the launcher's job folder. Without a folder, only this process can read the heartbeat."""
        self.rank, self.injector = rank, injector or Injector()
        self._number = self._index_in_step = self._first_step = 0
        self._memory: mmap.mmap | None = None
        if folder is not None:
            with open(folder / f"heartbeat_rank{rank}", "w+b") as file:
                file.truncate(_LAYOUT.size)
                self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
        self.last = Beat(rank, "start", 0, 0, time.time())
        self.at("start", 0)

    def at(self, phase: str, step: int) -> None:
        """Records that this rank enters `phase` of `step`."""
        self._number += 1
        self._index_in_step = self._index_in_step + 1 if step == self.last.step else 0
        if self._first_step == 0 and phase in STEP_PHASES:
            self._first_step = step
        now, number, index, first = time.time(), self._number, self._index_in_step, self._first_step
        self.last = Beat(self.rank, phase, step, number, now, index, first)
        if self._memory is not None:
            _LAYOUT.pack_into(self._memory, 0, now, step, number, index, first, phase.encode())
        self.injector.at(phase, step)


def clear_heartbeats(folder: Path, ranks: Collection[int]) -> None:
    """Removes the heartbeat files of these ranks, before the launcher restarts them."""
    for rank in ranks:
        (folder / f"heartbeat_rank{rank}").unlink(missing_ok=True)


def read_heartbeats(folder: Path) -> list[Beat]:
    """Returns the last beat of each rank that has written one to `folder`, sorted by rank."""
    beats = []
    for path in folder.iterdir():
        match = _FILE.fullmatch(path.name)
        data = path.read_bytes() if match else b""
        if match and len(data) == _LAYOUT.size:
            moment, step, number, index, first, phase = _LAYOUT.unpack(data)
            if number:
                beats.append(Beat(int(match[1]), phase.rstrip(b"\0").decode(), step, number, moment, index, first))
    return sorted(beats, key=lambda beat: beat.rank)


def last_beats(folder: Path, ranks: Collection[int]) -> list[Beat]:
    """Returns the last beat of each of these ranks; a rank without one yet is starting."""
    beats = {beat.rank: beat for beat in read_heartbeats(folder)}
    return [beats.get(rank, Beat(rank, "start", 0, 0, 0.0)) for rank in sorted(ranks)]
