"""Reads the status files of all ranks of a run, and notices ranks that no longer write or make no progress."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.formatting import shorten
from unisono.observe.report.series import number
from unisono.observe.watch.rank_status import STATUS, write_interval_s
from unisono.plain_files import open_regular, parse_json

SILENT_S = 5.0
"""A rank is silent if its status does not change for this many seconds (longer with more than 64 ranks)."""
STUCK_S = 20.0
"""A rank is reported if it stays in the same phase of the same step for this many seconds."""
MOST_RANKS = 4096
_LARGEST = 2**14
_FILE = re.compile(r"rank_(\d{1,6})\.json")


@dataclass(frozen=True)
class Rank:
    """What a rank is doing, according to its status file."""

    rank: int
    phase: str
    step: int
    total_steps: int
    device: str
    host: str
    numbers: dict[str, float] = field(default_factory=dict)
    """Finite numbers by name: step_ms, data_wait_ms, comm_ms, gpu_util, cpu_util, gpu_power_w, mem_gib, ..."""
    silent_s: float = 0.0
    """Seconds since the status last changed."""
    stuck_s: float = 0.0
    """Seconds since the rank last entered a phase."""
    ended: bool = False
    is_silent: bool = False

    @property
    def utilization(self) -> float | None:
        """The load of the rank's GPU, or on a CPU the number of cores that it keeps busy."""
        return self.numbers.get("gpu_util", self.numbers.get("cpu_util"))

    def share(self, name: str) -> float | None:
        """Returns the fraction of a step that a wait takes (data_wait_ms, comm_ms)."""
        wait, step = self.numbers.get(name), self.numbers.get("step_ms")
        return min(1.0, wait / step) if wait is not None and step else None

    @property
    def problem(self) -> str:
        """What is wrong with this rank; empty if nothing is."""
        if self.ended:
            return ""
        if self.is_silent:
            return "silent"
        return "no progress" if self.stuck_s >= STUCK_S else ""


class RankReader:
    """Reads the status files of a run repeatedly."""

    def __init__(self, run: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = run / STATUS, clock
        # The last record of each rank, when it changed, and when its heartbeat changed, by this process's clock:
        # the clocks of other machines may differ.
        self._last: dict[int, tuple[dict[str, Any], float, float]] = {}

    def read(self, world: int | None = None) -> list[Rank]:
        """Returns all ranks in order. `world` is the number of ranks, if known: files of earlier starts are ignored."""
        now, ranks = self._clock(), []
        for rank in self._listed(world):
            record = self._record(rank)
            if record is None:
                self._last.pop(rank, None)
                continue
            before = self._last.get(rank)
            if before is None:  # on the first read, only the age of the file is known
                age = max(0.0, time.time() - (number(record.get("time")) or 0.0))
                age_of_beat = max(age, time.time() - (number(record.get("phase_since")) or 0.0))
                before = record, now - age, now - age_of_beat
            elif before[0] != record:
                moved = before[0].get("beat") != record.get("beat") or before[0].get("pid") != record.get("pid")
                before = record, now, now if moved else before[2]
            self._last[rank] = before
            ranks.append(_rank_of(rank, record, now - before[1], now - before[2]))
        return ranks

    def _listed(self, world: int | None) -> list[int]:
        names: list[str] = []
        with suppress(OSError):
            if not self._folder.is_symlink():
                names = os.listdir(self._folder)
        found = sorted(int(match[1]) for match in map(_FILE.fullmatch, names) if match)
        return [rank for rank in found if world is None or rank < world][:MOST_RANKS]

    def _record(self, rank: int) -> dict[str, Any] | None:
        try:
            with open_regular(self._folder / f"rank_{rank}.json") as file:
                record = parse_json(file.read(_LARGEST))
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) else None


def _rank_of(rank: int, record: dict[str, Any], silent_s: float, stuck_s: float) -> Rank:
    world = number(record.get("world")) or 1
    ended = record.get("ended") is True
    return Rank(
        rank,
        _text(record.get("phase")),
        int(number(record.get("step")) or 0),
        int(number(record.get("total_steps")) or 0),
        _text(record.get("device")),
        _text(record.get("host")),
        {name: value for name, each in record.items() if (value := number(each)) is not None},
        silent_s,
        stuck_s,
        ended,
        is_silent=not ended and silent_s > SILENT_S * write_interval_s(int(min(world, 1e6))),
    )


def _text(value: Any) -> str:
    return shorten(value, 60) if isinstance(value, str) else ""
