"""The newest values of a metric whose entries have names, as bars."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from unisono.formatting import format_number
from unisono.observe.report.series import Curves
from unisono.pages import chart

_MOST = 24


def draw_bars(title: str, curves: Curves, labels: Sequence[str]) -> Markup:
    """The newest values as a <figure> with a bar each; of many, only the lowest and the highest."""
    if curves.newest is None:
        return Markup()
    step, newest = curves.newest
    values = [(labels[round(x) - 1], y) for x, y in newest.points() if 1 <= round(x) <= len(labels)]
    if not values:  # run.json may name other entries than metrics.jsonl has
        return Markup()
    note = ""
    if len(values) > _MOST:
        values.sort(key=lambda pair: pair[1])
        note = f"The {_MOST // 2} lowest and the {_MOST // 2} highest of {len(values):,}."
        values = values[: _MOST // 2] + values[-_MOST // 2 :]
    return chart.draw_bars(title, f"step {format_number(step)}", values, note)
