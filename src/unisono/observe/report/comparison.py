"""Renders one HTML page that compares runs: their curves in the same charts, and the settings in which they differ."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from unisono import __version__
from unisono.formatting import format_duration, format_number, shorten
from unisono.observe.report import page as report_page
from unisono.observe.report.charts import is_curve, is_smoothed
from unisono.observe.report.parts import as_text, status_of
from unisono.observe.report.read import Run
from unisono.observe.report.settings_table import shown
from unisono.pages.chart import Chart, Line, draw
from unisono.pages.kit import render

KIND = "comparison"
MOST_RUNS = 8
"""Maximum number of runs, because charts have eight colours."""
_FIRST = ("loss", "eval/loss")
_LAST = ("grad_norm", "lr", "samples_per_s", "step_ms", "mfu", "mem_gib")
_HIDDEN = ("data_wait_ms", "comm_ms", "compute_ms", "gpu_util", "gpu_power_w")
_FROM_ZERO = ("lr", "samples_per_s", "step_ms", "mfu", "mem_gib")
_TITLES = {
    "loss": "Loss, training",
    "grad_norm": "Gradient norm",
    "lr": "Learning rate",
    "samples_per_s": "Throughput",
    "step_ms": "Time per step",
    "mfu": "Model FLOPs utilization",
    "mem_gib": "Memory",
}
_UNITS = {"samples_per_s": "samples/s", "step_ms": "ms", "mem_gib": "GiB"}
_NOT_COMPARED = ("output_dir", "resume")  # differ between any two runs
_DOTS = 60  # a line with at most this many values also gets dots


def comparison(runs: Sequence[Run], now: datetime | None = None) -> str:
    """Returns the page that compares these runs."""
    now = now or datetime.now(UTC)
    names = unique_names([run.folder for run in runs])
    heads, rows = _overview(runs, names)
    return render(
        Path(__file__).with_name("comparison.html"),
        kind=KIND,
        title=f"{len(runs)} runs · {shorten(', '.join(names), 80)}",
        charts=True,
        shares=Path(report_page.__file__).with_name("report.html"),
        names=[shorten(name, 60) for name in names],
        heads=heads,
        rows=rows,
        charts_drawn=[draw(chart, number) for number, chart in enumerate(_charts(runs, names))],
        settings=_differences([_settings(run) for run in runs], [run.part("defaults") for run in runs]),
        versions=_differences([run.part("versions") for run in runs], [{} for _ in runs]),
        footer=f"Written by unisono {__version__} on {now:%Y-%m-%d at %H:%M} UTC from the run folders.",
    )


def unique_names(folders: Sequence[Path]) -> list[str]:
    """Returns for each path the shortest suffix that no other path has."""
    paths = [Path(os.path.abspath(folder)).parts for folder in folders]
    names = []
    for parts in paths:
        length = next(
            (n for n in range(1, len(parts)) if sum(other[-n:] == parts[-n:] for other in paths) == 1), len(parts)
        )
        names.append(str(Path(*parts[-length:])))
    return names


def _overview(runs: Sequence[Run], names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Returns the column headings and the rows of a table with one row per run."""
    headlines = [name for name in _metrics_of(runs) if name.startswith("eval/")][:3]
    heads = ["run", "status", "steps", "training time", "ranks", "loss", *headlines, "samples/s", "faults survived"]
    rows = []
    for name, run in zip(names, runs, strict=True):
        loss, speed = run.metrics.series.get("loss"), run.metrics.series.get("samples_per_s")
        last = ""
        if loss is not None and loss.last is not None:
            last = format_number((loss.trend() if is_smoothed(loss) else loss.points())[-1][1])
        rows.append(
            [
                shorten(name, 80),
                status_of(run)[0],
                format_number(run.metrics.step),
                format_duration(run.timeline.seconds(None), precise=True),
                as_text(run.starts[-1].get("world")) if run.starts else "",
                last,
                *(_last(run, each) for each in headlines),
                format_number(speed.mean, 3) if speed is not None and speed.count else "",
                f"{run.timeline.survived:,}",
            ]
        )
    return [shorten(head, 60) for head in heads], rows


def _settings(run: Run) -> dict[str, object]:
    of_run = {"recipe": run.record.get("recipe"), "effective batch": run.record.get("global_batch")}
    return {**of_run, **run.part("config")}


def _last(run: Run, name: str) -> str:
    series = run.metrics.series.get(name)
    return format_number(series.last[1]) if series is not None and series.last is not None else ""


def _metrics_of(runs: Sequence[Run]) -> list[str]:
    """Returns the metrics that any run has logged: the loss first, then the recipe's own, then speed and memory."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics.series))
    own = [name for name in names if name not in (*_FIRST, *_LAST, *_HIDDEN)]
    evaluated = [name for name in own if name.startswith("eval/")]
    return [
        *(name for name in _FIRST if name in names),
        *evaluated,
        *(name for name in own if name not in evaluated),
        *(name for name in _LAST if name in names),
    ]


def _charts(runs: Sequence[Run], names: Sequence[str]) -> list[Chart]:
    """Returns a chart per metric with a line per run; every run has the same colour in all charts."""
    charts = []
    for metric in _metrics_of(runs):
        lines = []
        for colour, (name, run) in enumerate(zip(names, runs, strict=True)):
            series = run.metrics.series.get(metric)
            if series is None or not series.count:
                continue
            evaluated = metric.startswith("eval/")
            trend = (
                series.trend() if not evaluated and metric not in ("lr", "mem_gib") and is_smoothed(series) else None
            )
            dots = evaluated and series.count <= _DOTS
            lines.append(Line(shorten(name, 40), series.points(), colour, trend, dots=dots))
        every = [run.metrics.series[metric] for run in runs if metric in run.metrics.series]
        same = all(one.last == other.last for one, other in pairwise(every))
        if lines and (any(map(is_curve, every)) or not same):
            title = _TITLES.get(metric, shorten(metric, 80))
            may_be_log = "loss" in metric or metric == "grad_norm"
            charts.append(
                Chart(title, lines, unit=_UNITS.get(metric, ""), from_zero=metric in _FROM_ZERO, may_be_log=may_be_log)
            )
    return charts


def _differences(parts: Sequence[dict[str, object]], defaults: Sequence[dict[str, object]]) -> list[list[str]]:
    """Returns a row per name whose values differ between the runs: the name, and its value in each run."""
    rows = []
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [
            shown(part[name]) if name in part else shown(default[name]) if name in default else "–"
            for part, default in zip(parts, defaults, strict=True)
        ]
        if len(set(values)) > 1 and name not in _NOT_COMPARED:
            rows.append([shorten(str(name), 80), *(shorten(value, 120) for value in values)])
    return rows[:200]
