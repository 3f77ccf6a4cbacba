"""The current state of a run, read from the records that were appended to its files since the last update."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.errors import UserError
from unisono.observe.folder import EVENTS, METRICS, RUN
from unisono.observe.lock import is_held
from unisono.observe.report.parts import status_of
from unisono.observe.report.read import Metrics, Run, read_record
from unisono.observe.report.series import number
from unisono.observe.report.timeline import Timeline
from unisono.observe.watch.growing_file import GrowingFile
from unisono.observe.watch.ranks import Rank, RankReader

MOST_POINTS = 400
"""Maximum number of points of a curve."""
_SPEED_OVER_S = 30.0
_CLOCK_EVERY = 500  # number of records between two checks of the time


class LiveRun:
    """A run that may progress, be killed and restarted, or be removed while it is watched."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self._clock = folder, clock
        self.ranks: list[Rank] = []
        self.is_gone = False
        """Whether the folder no longer contains a run. The last numbers are kept."""
        self.version = 0
        """Increases whenever a metric or an event was read."""
        self._metrics, self._timeline = Metrics(MOST_POINTS), Timeline()
        self._metrics_file, self._events_file = GrowingFile(folder / METRICS), GrowingFile(folder / EVENTS)
        self._reader = RankReader(folder, clock)
        self._record: dict[str, Any] = {}
        self._record_version: tuple[int, int] | None = None
        self._running = False
        self._steps: deque[tuple[float, int]] = deque()  # (time, step) pairs of the last half minute, for the speed

    def update(self, budget_s: float = 0.3) -> None:
        """Reads what is new, for about `budget_s` seconds; a huge file is read in several updates."""
        until = self._clock() + budget_s
        self._read_record()
        if self.is_gone:
            self.ranks, self._running = [], False
            return
        self._read(self._events_file, until)
        self._read(self._metrics_file, until)
        self.ranks = self._reader.read(self._world())
        fresh = any(not rank.ended and not rank.is_silent for rank in self.ranks)
        over = self._timeline.status in ("done", "stopped", "failed")
        self._running = fresh or (not over and is_held(self.folder))
        self._note_speed()

    @property
    def run(self) -> Run:
        """The run in the form that the report reads."""
        damaged = {
            METRICS: self._metrics_file.damaged + self._metrics.damaged,
            EVENTS: self._events_file.damaged + self._timeline.damaged,
        }
        return Run(self.folder, self._record, self._metrics, self._timeline, damaged, self._running)

    @property
    def state(self) -> tuple[str, str]:
        """The state of the run as one word, and a phrase that explains it."""
        if self.is_gone:
            return "gone", "its folder no longer contains a run"
        status = self._timeline.status
        if self._running and status == "restart":
            return "restarting", "the launcher restarts all ranks from the last checkpoint"
        if self._running and status is None:
            return "starting", "before its first step"
        if self._running and status != "done" and (problems := [rank for rank in self.ranks if rank.problem]):
            worst = max(problems, key=lambda rank: max(rank.silent_s, rank.stuck_s))
            seconds = worst.silent_s if worst.is_silent else worst.stuck_s
            return "waiting", f"rank {worst.rank}: {worst.problem} for {seconds:.0f} s, in {worst.phase}"
        return status_of(self.run)

    @property
    def fraction_read(self) -> float:
        """The fraction of metrics.jsonl that has been read."""
        return self._metrics_file.fraction_read

    @property
    def step(self) -> int:
        """The last step that was done."""
        in_progress = min((rank.step for rank in self.ranks), default=0)
        return max(int(self._metrics.step), in_progress - 1) if self._running else int(self._metrics.step)

    @property
    def total_steps(self) -> int:
        """The last step of the run; 0 if it is unknown."""
        total = max((rank.total_steps for rank in self.ranks), default=0)
        planned = number(self.run.part("config").get("max_steps"))
        return total or int(planned or 0)

    @property
    def seconds_left(self) -> float | None:
        """The time until the last step, at the speed of the last half minute."""
        if not self._running or not self.total_steps or not self._steps:
            return None
        (then, first), (now, last) = self._steps[0], self._steps[-1]
        if last > first and now > then:
            per_step = (now - then) / (last - first)
        else:
            step_ms = self._metrics.series.get("step_ms")
            if step_ms is None or step_ms.last is None:
                return None
            per_step = step_ms.last[1] / 1e3
        return max(0, self.total_steps - self.step) * per_step

    def _note_speed(self) -> None:
        if not self._running or (self._steps and self.step < self._steps[-1][1]):
            self._steps.clear()  # a restarted run repeats steps
        if self._running:
            self._steps.append((self._clock(), self.step))
            while self._steps[-1][0] - self._steps[0][0] > _SPEED_OVER_S:
                self._steps.popleft()

    def _world(self) -> int | None:
        world = number(self.run.starts[-1].get("world")) if self.run.starts else None
        return None if world is None else int(world)

    def _read_record(self) -> None:
        try:
            about = os.stat(self.folder / RUN)
        except (OSError, ValueError):
            self.is_gone, self._record_version = True, None
            return
        version = about.st_mtime_ns, about.st_ino
        if version != self._record_version:
            try:
                self._record = read_record(self.folder)
            except UserError:  # damaged, or removed just now: keep the last content
                self.is_gone = not self._record
                return
            self._record_version, self.version = version, self.version + 1
        self.is_gone = False

    def _read(self, file: GrowingFile, until: float) -> None:
        for count, record in enumerate(file.records()):
            self.version += 1
            if record is None:
                if file is self._metrics_file:
                    self._metrics = Metrics(MOST_POINTS)
                else:
                    self._timeline = Timeline()
            elif file is self._metrics_file:
                self._metrics.add(record)
            else:
                self._timeline.add(record)
            if count % _CLOCK_EVERY == 0 and self._clock() > until:
                return
