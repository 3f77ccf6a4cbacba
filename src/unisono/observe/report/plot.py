"""Plots metrics of a run with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from unisono.errors import UserError
from unisono.formatting import shorten
from unisono.observe.report.metrics_table import MetricsTable
from unisono.pages.axis import spans_decades


def plot(table: MetricsTable, names: Sequence[str] = (), title: str = "") -> Any:
    """Returns a matplotlib Figure with a chart per metric; by default the loss and the metrics of the evaluation.

    A metric and its evaluation share a chart. Raises UserError if matplotlib is missing or a metric is unknown.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("plot() needs matplotlib; run pip install matplotlib") from None

    class ShownFigure(Figure):
        """A figure that a notebook shows even if its matplotlib is not set up."""

        def _repr_png_(self) -> bytes:
            image = BytesIO()
            self.savefig(image, format="png", bbox_inches="tight")
            return image.getvalue()

    charts = _charts(table, names)
    if not charts:
        raise UserError("plot: this run has logged no numbers yet")
    columns = min(2, len(charts))
    rows = -(-len(charts) // columns)
    figure = ShownFigure(figsize=(6.0 * columns, 3.2 * rows), layout="constrained")
    for place, (name, lines) in enumerate(charts):
        axes = figure.add_subplot(rows, columns, place + 1)
        values = []
        for label, (steps, numbers) in lines:
            axes.plot(steps, numbers, label=label, marker="o" if len(steps) < 20 else None, markersize=3)
            values += numbers
        if "loss" in name and spans_decades(min(values), max(values)):
            axes.set_yscale("log")
        axes.set_title(shorten(name, 60), fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if len(lines) > 1:
            axes.legend(fontsize=8)
    if title:
        figure.suptitle(shorten(title, 100), fontsize=11)
    return figure


_Line = tuple[str, tuple[list[int], list[float]]]


def _charts(table: MetricsTable, names: Sequence[str]) -> list[tuple[str, list[_Line]]]:
    """Returns the name and the lines of each chart."""
    known = set(table.columns)
    unknown = next((name for name in names if name not in known and f"eval/{name}" not in known), None)
    if unknown is not None:
        raise UserError(f"plot: {unknown!r} is not a metric of this run; it has {', '.join(table.columns)}")
    chosen = list(names)
    if not chosen:
        evaluated = [name.removeprefix("eval/") for name in table.columns if name.startswith("eval/")]
        chosen = list(dict.fromkeys(["loss", *evaluated]))
    charts = []
    for name in chosen:
        both = [("training", name), ("evaluation", f"eval/{name}")]
        lines = [(label, table.points(each)) for label, each in both if each in known]
        lines = [(label, points) for label, points in lines if points[0]]
        if lines:
            charts.append((name, lines))
    return charts
