"""Reads the files of a run folder in one pass and in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import UserError
from unisono.observe.folder import EVENTS, METRICS, RUN
from unisono.observe.json_lines import JsonLines
from unisono.observe.lock import is_held
from unisono.observe.report.series import LIMIT, Curves, Series, number
from unisono.observe.report.timeline import Timeline
from unisono.plain_files import read_json

MAX_METRICS = 200
MAX_RANKS = 8
_BY_RANK = "_by_rank"
_NOT_DRAWN = {"step", "epoch", "samples", "count", "world", "skipped", "slowest_rank", "slowest_compute_rank", "own_ms"}
_DRAWN_BY_RANK = ("own_ms", "compute_ms", "comm_ms", "mfu", "gpu_util", "gpu_power_w")


class Metrics:
    """The content of metrics.jsonl: numbers and curves by name, and the last step, sample and epoch."""

    def __init__(self, most_points: int = LIMIT) -> None:
        """`most_points` is the maximum number of points of a series."""
        self._most_points = most_points
        self.series: dict[str, Series] = {}
        self.curves: dict[str, Curves] = {}
        self.by_rank: dict[str, dict[int, Series]] = {}
        """Numbers by name and rank: a rank's own time, its wait for the others, its GPU's load."""
        self.step = self.samples = self.epoch = 0.0
        self.damaged = 0
        self.omitted: set[str] = set()

    def add(self, record: Mapping[str, Any]) -> None:
        """Adds one record of metrics.jsonl."""
        step = number(record.get("step"))
        if step is None:
            self.damaged += 1
            return
        self.step = max(self.step, step)
        self.samples = max(self.samples, number(record.get("samples")) or 0)
        self.epoch = max(self.epoch, number(record.get("epoch")) or 0)
        for name, value in record.items():
            if name in _NOT_DRAWN:
                continue
            kind = type(value)
            if kind is float or kind is int or (kind is str and value in ("nan", "inf", "-inf")):
                series = self.series.get(name)
                if series is None:
                    if not self._room_for(name):
                        continue
                    series = self.series[name] = Series(limit=self._most_points)
                series.take(step, value)
            elif kind is list:
                self._add_list(name, step, value)

    def _add_list(self, name: str, step: float, values: list[Any]) -> None:
        kind = name.removesuffix(_BY_RANK)
        if kind != name and kind in _DRAWN_BY_RANK:
            of_ranks = self.by_rank.setdefault(kind, {})
            for rank, value in enumerate(values[:MAX_RANKS]):
                of_ranks.setdefault(rank, Series(limit=self._most_points)).take(step, value)
        elif kind == name and (name in self.curves or self._room_for(name)):
            if name not in self.curves:
                self.curves[name] = Curves()
            self.curves[name].add(step, values)

    def _room_for(self, name: str) -> bool:
        if len(self.series) + len(self.curves) < MAX_METRICS:
            return True
        if len(self.omitted) < MAX_METRICS:
            self.omitted.add(name)
        return False


@dataclass(frozen=True)
class Run:
    """A run, as read from its folder."""

    folder: Path
    record: dict[str, Any]
    """The content of run.json, which is not validated."""
    metrics: Metrics
    timeline: Timeline
    damaged: dict[str, int]
    """Number of lines that could not be read, by file."""
    running: bool

    def part(self, name: str) -> dict[str, Any]:
        """Returns the mapping `name` in run.json; empty if it is missing or not a mapping."""
        value = self.record.get(name)
        return value if isinstance(value, dict) else {}

    @property
    def starts(self) -> list[dict[str, Any]]:
        """Every start of the run, oldest first."""
        starts = self.record.get("starts")
        return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []


def read_run(folder: Path) -> Run:
    """Reads the run in a folder; raises UserError if there is none."""
    record = read_record(folder)
    metrics, timeline = Metrics(), Timeline()
    metric_lines, event_lines = JsonLines(folder / METRICS), JsonLines(folder / EVENTS)
    for line in metric_lines:
        metrics.add(line)
    for line in event_lines:
        timeline.add(line)
    damaged = {METRICS: metric_lines.damaged + metrics.damaged, EVENTS: event_lines.damaged + timeline.damaged}
    return Run(folder, record, metrics, timeline, damaged, running=is_held(folder))


def read_record(folder: Path) -> dict[str, Any]:
    """Returns the content of run.json, which is not validated; raises UserError if the folder contains no run."""
    file = folder / RUN
    try:
        if not file.is_file():
            raise UserError(f"{folder} is not a run folder (it has no {RUN}); pass the output_dir of a run")
        record = read_json(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); check its permissions") from None
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}); restore it from a copy") from None
    if not isinstance(record, dict) or "recipe" not in record:
        raise UserError(f"{file} does not describe a run; pass the output_dir of a run")
    return record
