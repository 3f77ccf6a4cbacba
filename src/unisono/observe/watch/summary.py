"""Describes a run in a few lines, as text and as HTML that includes its style, for pages of other programs."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from unisono.formatting import format_duration, format_number, format_rate, printable, shorten
from unisono.observe.report.charts import is_smoothed
from unisono.observe.watch.live_run import LiveRun
from unisono.observe.watch.rank_rows import rank_rows, used_columns
from unisono.pages.chart import sparkline
from unisono.pages.kit import render_part

_TEMPLATE = Path(__file__).with_name("summary.html")
_MOST_RANKS = 16


def as_text(run: LiveRun) -> str:
    """Returns the run in one line."""
    return "  ".join([_state(run), *_numbers(run)])


def as_html(run: LiveRun) -> Markup:
    """Returns the run as a small block: progress, numbers, loss, and its ranks if there are several."""
    loss = run.run.metrics.series.get("loss")
    points = [] if loss is None else loss.trend() if is_smoothed(loss) else loss.points()
    rows, num_more = rank_rows(run.ranks, _MOST_RANKS)
    if len(rows) < 2:
        rows = [row for row in rows if row.problem]
    fraction = min(1.0, run.step / run.total_steps) if run.total_steps else None
    state, _, sentence = _state(run).partition(": ")
    return render_part(
        _TEMPLATE,
        "summary",
        state,
        sentence,
        fraction,
        _numbers(run),
        sparkline(points),
        rows,
        used_columns(rows),
        num_more,
    )


def _state(run: LiveRun) -> str:
    if run.is_gone and not run.run.record:
        return "starting: before the first step"
    state, sentence = run.state
    return state if state in ("running", "done") else f"{state}: {printable(shorten(sentence, 200))}"


def _numbers(run: LiveRun) -> list[str]:
    series = run.run.metrics.series
    shown = [f"step {run.step:,}{f'/{run.total_steps:,}' if run.total_steps else ''}"]
    loss = series.get("loss")
    if loss is not None and loss.last is not None:
        shown.append(f"loss {format_number(loss.last[1])}")
    evaluated = [name for name in series if name.startswith("eval/") and series[name].last is not None]
    for name in evaluated[:3]:
        last = series[name].last
        assert last is not None
        shown.append(f"{printable(shorten(name, 60))} {format_number(last[1])}")
    if (left := run.seconds_left) is not None:
        shown.append(f"{format_duration(left)} left")
    speed = series.get("samples_per_s")
    if speed is not None and speed.last is not None:
        shown.append(f"{format_rate(speed.last[1])} samples/s")
    return shown
