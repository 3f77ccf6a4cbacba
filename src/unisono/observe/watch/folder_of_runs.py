"""Finds the runs in a folder, and keeps the list up to date when runs appear or disappear."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from unisono.errors import UserError
from unisono.observe.folder import EVENTS, RUN
from unisono.observe.report.comparison import unique_names
from unisono.observe.watch.live_run import LiveRun

MOST_RUNS = 200
_DEPTH = 2  # runs/a, and runs/study/trial_1
_MOST_FOLDERS = 5000
_SCAN_EVERY_S = 2.0


class Runs:
    """All runs below the folders that the user named, with unique names, the most recently active first."""

    def __init__(self, paths: list[Path], clock: Callable[[], float] = time.monotonic) -> None:
        """Raises UserError if a path does not exist."""
        for path in paths:
            if not path.is_dir():
                raise UserError(f"{path} is not a folder; pass a run folder, or a folder that contains runs")
        self._paths, self._clock = paths, clock
        self.is_one_run = len(paths) == 1 and (paths[0] / RUN).is_file()
        """Whether the user named exactly one run, which needs no list."""
        self.by_name: dict[str, LiveRun] = {}
        self.num_omitted = 0
        self._scanned_at: float | None = None

    def update(self) -> None:
        """Finds new runs, and reads what is new in each."""
        now = self._clock()
        if self._scanned_at is None or now - self._scanned_at >= _SCAN_EVERY_S:
            self._scanned_at = now
            self._scan()
        for run in self.by_name.values():
            run.update(budget_s=max(0.02, 0.5 / len(self.by_name)))

    def _scan(self) -> None:
        found = [folder for path in self._paths for folder in _runs_in(path)]
        known = {run.folder for run in self.by_name.values()}
        new = sorted((folder for folder in dict.fromkeys(found) if folder not in known), key=_last_active, reverse=True)
        room = max(0, MOST_RUNS - len(known))
        self.num_omitted = len(new) - len(new[:room])
        runs = [*self.by_name.values(), *(LiveRun(folder) for folder in new[:room])]
        runs.sort(key=lambda run: _last_active(run.folder), reverse=True)
        names = unique_names([run.folder for run in runs])
        self.by_name = dict(zip(names, runs, strict=True))


def _runs_in(path: Path) -> list[Path]:
    """Returns the run folders at `path` or below it. Follows no symbolic links below it."""
    runs, level, seen = [], [path], 0
    for depth in range(_DEPTH + 1):
        below: list[Path] = []
        for folder in level:
            if (folder / RUN).is_file():
                runs.append(folder)
            elif depth < _DEPTH and seen < _MOST_FOLDERS:
                inside = _folders_in(folder)
                seen += len(inside)
                below += inside
        level = below
    return runs


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [
                folder / entry.name
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []


def _last_active(folder: Path) -> float:
    times = [0.0]
    for name in (EVENTS, RUN):
        try:
            times.append(os.stat(folder / name).st_mtime)
        except OSError:
            continue
    return max(times)
