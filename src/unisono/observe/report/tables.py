"""Makes the tables of metrics: single values, constants, and evaluations before and after training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unisono.formatting import format_number
from unisono.observe.report.charts import is_curve
from unisono.observe.report.read import Metrics
from unisono.observe.report.series import Series
from unisono.pages.chart import Chart

_EVAL = "eval/"
Row = Sequence[str]


def before_and_after(metrics: Metrics) -> list[Row]:
    """Returns a row for each metric that was evaluated at step 0: name, value at step 0, last value, change."""
    rows: list[Row] = []
    for name, series in metrics.series.items():
        first, last = series.first, series.last
        if not name.startswith(_EVAL) or first is None or last is None or first[0] != 0 or last[0] == 0:
            continue
        change = last[1] - first[1]
        signed = f"{'+' if change > 0 else ''}{format_number(change, 3)}"
        rows.append((name, format_number(first[1]), format_number(last[1]), signed))
    return rows


def single_values(series: dict[str, Series], names: Iterable[str], drawn: Sequence[Chart]) -> list[Row]:
    """Returns a row for each metric in `names` that no chart in `drawn` shows: name, value, and at which steps."""
    shown = {id(points) for chart in drawn for points in chart.series}
    rows: list[Row] = []
    for name in names:
        values = series.get(name)
        if values is None or values.last is None or is_curve(values) or id(values) in shown:
            continue
        first, last = values.first or values.last, values.last
        when = f"step {format_number(last[0])}"
        if values.count > 1:
            when = f"always, steps {format_number(first[0])} to {format_number(last[0])}"
        rows.append((name, format_number(last[1]), when))
    return rows
