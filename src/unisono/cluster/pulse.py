"""The pulse of a rank: in which phase of which step it is, and since when.

A rank says where it is at every phase of a step. That is written to a small memory-mapped file, so that whoever looks
after the rank can read it from outside, also when the rank hangs, was killed or holds python's lock; it costs about a
microsecond and asks neither the GPU nor another rank. At the same points a rehearsed fault (`unisono.faults`) happens.
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

_LAYOUT = struct.Struct("<dqqqq24s")  # wall clock, step, number of the beat, place in the step, first step, phase
_FILE = re.compile(r"pulse_rank(\d+)")

STEP_PHASES = ("data", "forward", "backward", "reduce", "optimizer")
"""The phases of a step, in order; with several micro-batches the first three come again. In reduce a rank waits."""


@dataclass(frozen=True)
class Beat:
    """Where a rank was last seen."""

    rank: int
    phase: str
    step: int  # being computed, from 1; 0 before the first
    number: int  # counts the beats: while it stands still, so does the rank
    time: float  # wall clock
    place: int = 0  # counts the beats of this step: all ranks go through the same ones
    first_step: int = 0  # the first one since the rank was started; 0 before it

    @property
    def is_starting(self) -> bool:
        """Whether the first step, which may compile, is not done yet."""
        return self.first_step == 0 or self.step <= self.first_step


class Pulse:
    """Where this rank is. `at` is called by the one thread that trains."""

    def __init__(self, rank: int = 0, folder: Path | None = None, injector: Injector | None = None) -> None:
        """`folder` is where the launcher looks for it (None: nobody outside does)."""
        self.rank, self.injector = rank, injector or Injector()
        self._number = self._place = self._first_step = 0
        self._memory: mmap.mmap | None = None
        if folder is not None:
            with open(folder / f"pulse_rank{rank}", "w+b") as file:
                file.truncate(_LAYOUT.size)
                self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
        self.last = Beat(rank, "start", 0, 0, time.time())
        self.at("start", 0)

    def at(self, phase: str, step: int) -> None:
        """This rank has come to `phase` of `step`."""
        self._number += 1
        self._place = self._place + 1 if step == self.last.step else 0
        if self._first_step == 0 and phase in STEP_PHASES:
            self._first_step = step
        now, number, place, first = time.time(), self._number, self._place, self._first_step
        self.last = Beat(self.rank, phase, step, number, now, place, first)
        if self._memory is not None:
            _LAYOUT.pack_into(self._memory, 0, now, step, number, place, first, phase.encode())
        self.injector.at(phase, step)


def forget_pulses(folder: Path, ranks: Collection[int]) -> None:
    """Before these ranks are started again: what their predecessors left says nothing about them."""
    for rank in ranks:
        (folder / f"pulse_rank{rank}").unlink(missing_ok=True)


def read_pulses(folder: Path) -> list[Beat]:
    """Where each rank that keeps its pulse in `folder` was last seen, by rank."""
    beats = []
    for path in folder.iterdir():
        match = _FILE.fullmatch(path.name)
        data = path.read_bytes() if match else b""
        if match and len(data) == _LAYOUT.size:
            moment, step, number, place, first, phase = _LAYOUT.unpack(data)
            if number:
                beats.append(Beat(int(match[1]), phase.rstrip(b"\0").decode(), step, number, moment, place, first))
    return sorted(beats, key=lambda beat: beat.rank)
