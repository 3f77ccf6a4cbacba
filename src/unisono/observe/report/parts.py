"""Renders the parts of a page about a run that the report and `unisono watch --web` share."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from unisono.formatting import format_clock, format_count, format_duration, format_number, shorten
from unisono.observe.report.charts import (
    SPEED,
    bar_chart,
    is_smoothed,
    learning_charts,
    speed_charts,
    trained_in_turn,
)
from unisono.observe.report.previews import Gallery
from unisono.observe.report.read import Run
from unisono.observe.report.settings_table import shown
from unisono.observe.report.tables import Row, before_and_after, single_values
from unisono.observe.report.timeline import Event, parse_time
from unisono.pages.chart import draw

_OF_ALL_RANKS = {"start", "resume", "restart"}  # events that concern all ranks, although one rank records them


def status_of(run: Run) -> tuple[str, str]:
    """Returns the state of the run as one word, and a phrase that explains it."""
    status = run.timeline.status
    if status == "done":
        return "done", "trained to the end"
    if run.running:
        return "running", "training now"
    if status == "stopped":
        return "stopped", "with a checkpoint; run the same command to continue"
    if status == "pruned":
        pruned = [event for event in run.timeline.all() if event.kind == "pruned"]
        return "pruned", f"by unisono tune {pruned[-1].sentence}" if pruned else "by unisono tune"
    if status == "failed":
        failures = [event for event in run.timeline.all() if event.kind == "failed"]
        return "failed", failures[-1].sentence if failures else ""
    return "unfinished", "it was killed, or it runs on another machine; run the same command to continue"


def facts(run: Run, now: datetime) -> list[tuple[str, str]]:
    timeline, starts = run.timeline, run.starts
    began = parse_time(run.record.get("created")) or timeline.began
    seconds = timeline.seconds(now if run.running else None)
    times = f" in {format_count(len(starts), 'start')}" if len(starts) > 1 else ""
    strategy = as_text(starts[-1].get("strategy")) if starts else ""
    return [
        ("started", f"{began:%d %B %Y, %H:%M} UTC" if began else "unknown"),
        ("training time", format_duration(seconds, precise=True) + times),
        ("ranks", _changes(starts, "world") + (f", {strategy}" if strategy else "")),
        ("launcher", _changes(starts, "launcher")),
        ("seed", as_text(run.record.get("seed"))),
        # A resumed run keeps its effective batch, even if the setting batch_size was changed.
        ("effective batch", as_text(run.record.get("global_batch", "unknown"))),
    ]


def _changes(starts: Sequence[dict[str, Any]], key: str) -> str:
    """Returns how a value changed over the run's starts, as in 8 → 4 → 8."""
    values = [as_text(start.get(key)) for start in starts]
    changes = [value for before, value in pairwise(["", *values]) if value != before]
    return " → ".join([*changes[:3], "…", *changes[-3:]] if len(changes) > 7 else changes) or "unknown"


def tiles(run: Run) -> list[tuple[str, str, str]]:
    metrics, timeline = run.metrics, run.timeline
    epochs = f", epoch {format_number(metrics.epoch, 3)}" if metrics.epoch else ""
    tiles = [("steps", format_number(metrics.step), f"{format_number(metrics.samples)} samples{epochs}")]
    for group in trained_in_turn(metrics.series) or [""]:
        loss = metrics.series.get(f"{group}/loss" if group else "loss")
        if loss is not None and loss.count:
            # Show the same number as the chart's legend.
            points, smoothed = (loss.trend(), ", smoothed") if is_smoothed(loss) else (loss.points(), "")
            more = f"from {format_number(points[0][1], 3)}, lowest logged {format_number(loss.lowest, 3)}"
            of_group = f" of {group}" if group else ""
            tiles.append((f"loss{of_group}{smoothed}", format_number(points[-1][1]), more))
    name = _headline(run)
    if name is not None:
        series = metrics.series[name]
        best = f"lowest {format_number(series.lowest)}, highest {format_number(series.highest)}"
        tiles.append((name, format_number(series.last[1]) if series.last else "", best))
    speed = metrics.series.get("samples_per_s")
    if speed is not None and speed.count:
        tiles.append(("samples/s", format_number(speed.mean, 3), f"peak {format_number(speed.highest, 3)}"))
    mfu = metrics.series.get("mfu")
    if mfu is not None and mfu.count:
        tiles.append(("MFU", f"{mfu.mean:.1%}", f"peak {mfu.highest:.1%}"))
    memory = metrics.series.get("mem_gib")
    if memory is not None and memory.count:
        tiles.append(("peak memory", f"{format_number(memory.highest, 3)} GiB", "per rank"))
    restarts = format_count(timeline.counts["restart"], "restart") if timeline.counts["restart"] else "no restart"
    restarts += f", {format_count(timeline.repeated, 'step')} repeated" if timeline.repeated else ""
    return [*tiles, ("faults survived", f"{timeline.survived:,}", restarts)]


def _headline(run: Run) -> str | None:
    """Returns the evaluation metric for the top of the page: best_metric if it is set, otherwise the first one."""
    evaluated = [name for name, series in run.metrics.series.items() if name.startswith("eval/") and series.count]
    chosen = run.part("config").get("best_metric")
    if chosen in evaluated:
        return str(chosen)
    return next((name for name in evaluated if name != "eval/loss"), evaluated[0] if evaluated else None)


def charts_and_values(run: Run) -> dict[str, Any]:
    labels = _labels(run)
    learning = learning_charts(run.metrics, run.timeline, labels)
    speed = speed_charts(run.metrics, run.timeline)
    bars = [bar_chart(name.removeprefix("eval/"), run.metrics.curves[name], labels[name]) for name in labels]
    compared = before_and_after(run.metrics)
    series, compared_names = run.metrics.series, {row[0] for row in compared}
    in_learning = [name for name in series if name not in SPEED | compared_names]
    return {
        "compared": _shortened(compared),
        "learning_charts": [*(draw(chart, number) for number, chart in enumerate(learning)), *bars],
        "learning_values": _shortened(single_values(series, in_learning, learning)),
        "speed_charts": [draw(chart, number) for number, chart in enumerate(speed, len(learning))],
        "speed_values": _shortened(single_values(series, [name for name in series if name in SPEED], speed)),
    }


def _labels(run: Run) -> dict[str, list[str]]:
    """Returns the names of the entries of evaluation curves. Reads them from run.json, which may be damaged."""
    labels = {}
    for name, names in run.part("labels").items():
        curves = run.metrics.curves.get(f"eval/{name}")
        if curves is not None and isinstance(names, list) and names:
            labels[f"eval/{name}"] = [shown(each) for each in names[:10_000]]
    return labels


def _shortened(rows: Sequence[Row]) -> list[list[str]]:
    return [[shorten(cell, 80) for cell in row] for row in rows]


def faults(run: Run) -> dict[str, Any]:
    timeline = run.timeline
    first, last = timeline.events()
    sentences = list(filter(None, [timeline.stops(), timeline.saves()]))
    if timeline.counts["injected"]:
        sentences.append("Some faults were injected with --inject; they really happened in the run's processes.")
    if not timeline.survived:
        sentences.insert(0, "Nothing went wrong.")
    return {
        "fault_summary": " ".join(sentences),
        "first_events": [event_row(event, timeline.began) for event in first],
        "last_events": [event_row(event, timeline.began) for event in last],
        "num_hidden_events": timeline.num_hidden,
    }


def event_row(event: Event, began: datetime | None) -> dict[str, Any]:
    step = f"step {format_number(event.step)}" if event.step is not None else ""
    if event.count > 1 and event.last_step is not None and event.step is not None:
        step = f"steps {format_number(event.step)}–{format_number(event.last_step)}"
    return {
        "tone": event.tone,
        "after": f"+{format_clock((event.when - began).total_seconds())}" if event.when and began else "",
        "exact": f"{event.when:%Y-%m-%d %H:%M:%S} UTC" if event.when else "",
        "step": step,
        "title": event.title,
        "count": event.count,
        "rank": None if event.kind in _OF_ALL_RANKS else event.rank,
        "sentence": event.sentence,
    }


def preview_cards(gallery: Gallery) -> list[dict[str, Any]]:
    previews = []
    for name, steps in gallery.shown.items():
        newest, *earlier = [
            {
                "step": f"step {format_number(step)}",
                "html": html,
                "caption": shorten(gallery.captions.get((name, step), ""), 500),
            }
            for step, html in steps
        ]
        previews.append({"name": shorten(name, 120), "newest": newest, "earlier": earlier})
    return previews


def as_text(value: Any) -> str:
    """Converts any value from run.json to text of limited length."""
    return shorten(shown(value), 200)
