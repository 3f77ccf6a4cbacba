"""Writes each rank's status to a small file in the run folder, which a thread replaces about once per second.

The thread reads what the rank already has in memory: its heartbeat, the numbers of the last logged step, and the load
of its GPU. So no step waits for a disk or for another rank, and the status shows where a rank hangs. Small files that
are replaced by a rename work on every shared file system. Nothing is written before the folder contains a run, because
a user error must leave no files.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from unisono.atomic_files import write_atomically
from unisono.cluster.hangs.heartbeat import Heartbeat
from unisono.observe.folder import RUN

STATUS = "live"
"""The folder of the status files in a run folder."""
EVERY_S = 1.0
"""Seconds between two writes of a rank, for up to 64 ranks."""
_RANKS_PER_SECOND = 64  # more ranks write less often, so that a shared file system never sees more renames


def write_interval_s(world: int) -> float:
    """Returns the seconds between two writes of one rank."""
    return EVERY_S * max(1.0, world / _RANKS_PER_SECOND)


def status_file(run: Path, rank: int) -> Path:
    """Returns the status file of a rank."""
    return run / STATUS / f"rank_{rank}.json"


class RankStatus:
    """Writes the status of this rank until it is closed."""

    def __init__(self, run: Path, heartbeat: Heartbeat, world: int) -> None:
        self.numbers: Mapping[str, float] = {}
        """This rank's numbers of the last logged interval: step_ms, data_wait_ms, comm_ms, ..."""
        self.total_steps = 0
        """The last step of the run; 0 if it is unknown."""
        self.device = "cpu"
        self.measure: Callable[[], Mapping[str, float]] = dict
        """Returns current measurements of the device; called in the thread, so it must not use CUDA streams."""
        self._run, self._heartbeat, self._world = run, heartbeat, world
        self._every_s = write_interval_s(world)
        self._stop = Event()
        self._thread: Thread | None = None
        self._cpu = time.process_time(), time.monotonic()
        self._has_written = False

    def start(self) -> None:
        """Starts the thread."""
        self._thread = Thread(target=self._write_regularly, name="rank status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes the last status, which says that this rank has ended, and stops the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)  # a network file system may block it; the thread is a daemon

    def write(self, *, ended: bool = False) -> None:
        """Writes the status now; does nothing if the folder contains no run or cannot be written."""
        with suppress(OSError):  # the next write tries again
            if not (self._run / RUN).exists():
                return
            self._has_written = True
            file = status_file(self._run, self._heartbeat.rank)
            text = json.dumps(self._record(ended))
            try:
                write_atomically(file, text, one_writer=True)
            except FileNotFoundError:
                file.parent.mkdir(exist_ok=True)
                write_atomically(file, text, one_writer=True)

    def _write_regularly(self) -> None:
        # Begin with a pause, so that a start that is rejected at once leaves the previous start's files unchanged.
        while not self._stop.wait(self._every_s):
            self.write()
        if self._has_written or self.numbers:
            self.write(ended=True)

    def _record(self, ended: bool) -> dict[str, Any]:
        beat = self._heartbeat.last
        before, now = self._cpu, (time.process_time(), time.monotonic())
        self._cpu = now
        elapsed = now[1] - before[1]
        record: dict[str, Any] = {
            "rank": beat.rank,
            "world": self._world,
            "host": platform.node(),
            "pid": os.getpid(),
            "device": self.device,
            "time": round(time.time(), 3),
            "phase": beat.phase,
            "phase_since": round(beat.time, 3),
            "beat": beat.number,
            "step": beat.step,
            "total_steps": self.total_steps,
        }
        if elapsed > 0:
            record["cpu_util"] = round((now[0] - before[0]) / elapsed, 3)
        for name, value in {**self.numbers, **self.measure()}.items():
            record[name] = round(value, 4)
        return record | ({"ended": True} if ended else {})
