"""Draws charts as HTML and SVG that work without scripts, with screen readers, and in light and dark mode.

The style sheet sets the colours by class. Each line contains its values in data attributes, from which chart.js shows
the values under the pointer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from markupsafe import Markup

from unisono.formatting import format_number, shorten
from unisono.pages.axis import Axis, linear, logarithmic, spans_decades

Point = tuple[float, float]

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 10, 34
_MARK_STRIP = 16
_NUM_COLOURS = 8
_DENSE = 500  # a line with more points looks like a filled area


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    trend: Sequence[Point] | None = None
    """A smoothed version of this line. If set, it is drawn over this line, which then is faint."""
    old: bool = False
    """Whether this is an earlier curve of the same metric. Such a line is faint and not in the legend."""
    dots: bool = False
    """Whether to draw a dot at each point."""
    joined: bool = True
    """Whether to join the points by a line."""


@dataclass(frozen=True)
class Mark:
    """An event at a position of the x axis. Where labels would overlap, only the first one is shown."""

    x: float
    label: str
    text: str


@dataclass(frozen=True)
class Chart:
    """A chart, which consists of lines and marks."""

    title: str
    lines: Sequence[Line]
    x_name: str = "step"
    unit: str = ""
    from_zero: bool = False
    may_be_log: bool = False
    marks: Sequence[Mark] = field(default=())
    note: str = ""
    series: Sequence[object] = field(default=())
    """The series that the chart shows. Only the caller uses them."""


def draw(chart: Chart, number: int) -> Markup:
    """Returns the chart as a <figure>. `number` makes the ids of its elements unique on the page."""
    points = [point for line in chart.lines for point in line.points]
    if not points:
        return Markup()
    top = _TOP + (_MARK_STRIP if chart.marks else 0)
    x, y = _axes(chart, points, top)
    title, text = f"chart{number}-title", f"chart{number}-text"
    plot = {"left": _LEFT, "right": WIDTH - _RIGHT, "x": [x.low, x.high], "name": chart.x_name, "unit": chart.unit}
    parts = [
        f'<figure class="card chart"><figcaption><h3>{escape(chart.title)}</h3>{_legend(chart)}</figcaption>',
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{title} {text}" '
        f'data-plot="{escape(json.dumps(plot))}">',
        f'<title id="{title}">{escape(chart.title)}</title><desc id="{text}">{escape(_described(chart, y))}</desc>',
        *_grid(x, y, chart.x_name, top),
        *_marks(chart.marks, x, top),
        *(_line(line, x, y) for line in chart.lines if line.points),
        f'<line class="cursor" y1="{top}" y2="{HEIGHT - _BOTTOM}" visibility="hidden"/></svg>',
    ]
    notes = [chart.note] if chart.note else []
    if y.log:
        notes.append("Logarithmic axis.")
    if any(line.trend for line in chart.lines):
        notes.append("The faint line shows the logged values, the bold line their running mean.")
    if notes:
        parts.append(f'<p class="note">{escape(" ".join(notes))}</p>')
    return Markup("\n".join(parts) + "</figure>")


def sparkline(points: Sequence[Point]) -> Markup:
    """Returns a small curve without axes; empty if there is nothing to draw."""
    if len(points) < 2:
        return Markup()
    x = linear(points[0][0], points[-1][0], 2, 298, tight=True)
    low, high = min(y for _, y in points), max(y for _, y in points)
    y = logarithmic(low, high, 50, 4) if spans_decades(low, high) else linear(low, high, 50, 4, tight=True)
    return Markup(
        f'<svg class="spark" viewBox="0 0 300 54" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="line c0" vector-effect="non-scaling-stroke" d="{_path(points, x, y)}"/></svg>'
    )


def draw_bars(title: str, caption: str, values: Sequence[tuple[str, float]], note: str = "") -> Markup:
    """Returns a <figure> with a bar for each named value."""
    numbers = [value for _, value in values]
    low = min(0.0, *numbers)
    high = 1.0 if low == 0 and max(numbers) <= 1 else max(0.0, *numbers)
    rows = "".join(
        f'<tr><th scope="row">{escape(shorten(label, 60))}</th>'
        f'<td><meter min="{low:g}" max="{high:g}" value="{value:.6g}"></meter></td>'
        f"<td>{escape(format_number(value, 3))}</td></tr>"
        for label, value in values
    )
    return Markup(
        f'<figure class="card chart bars"><figcaption><h3>{escape(shorten(title, 120))}</h3>'
        f"<span>{escape(caption)}</span></figcaption><table>{rows}</table>"
        + (f'<p class="note">{escape(note)}</p>' if note else "")
        + "</figure>"
    )


def _axes(chart: Chart, points: Sequence[Point], top: float) -> tuple[Axis, Axis]:
    # Marks do not extend the axis, because an early event would squeeze the curve of a resumed run.
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = min(y for _, y in points), max(y for _, y in points)
    if x_low == x_high:  # with a single step, the axis starts at 0
        x_low, x_high = min(x_low, 0.0), max(x_high, 0.0) or 1.0
    elif 0 < x_low <= 0.1 * x_high:
        x_low = 0
    x = linear(x_low, x_high, _LEFT, WIDTH - _RIGHT, num_ticks=6, tight=True)
    bottom = HEIGHT - _BOTTOM
    if chart.may_be_log and spans_decades(y_low, y_high):
        return x, logarithmic(y_low, y_high, bottom, top)
    if chart.from_zero and y_low >= 0:
        y_low = 0.0
        y_high = y_high or 1.0
    fraction = y_low >= 0 and 0 < y_high <= 1
    return x, linear(y_low, y_high, bottom, top, least=0.0 if y_low >= 0 else None, most=1.0 if fraction else None)


def _grid(x: Axis, y: Axis, x_name: str, top: float) -> list[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = []
    for value, label in y.ticks:
        at = f"{y.position(value):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{at}" dy=".32em" text-anchor="end">{label}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    for value, label in x.ticks:
        position = x.position(value)
        parts.append(f'<line class="axis" x1="{position:.1f}" x2="{position:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        anchor = "end" if position > right - 12 else "middle"
        shift = right if anchor == "end" else position
        parts.append(f'<text class="tick" x="{shift:.1f}" y="{bottom + 16}" text-anchor="{anchor}">{label}</text>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text class="tick name" x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">{escape(x_name)}</text>')
    return parts


def _marks(marks: Sequence[Mark], x: Axis, top: float) -> list[str]:
    parts: list[str] = []
    taken: list[tuple[float, float]] = []
    for mark in marks:
        if not x.low <= mark.x <= x.high:
            continue
        at = x.position(mark.x)
        label = ""
        width = 6.2 * len(mark.label)
        left = min(max(at - width / 2, _LEFT - 8), WIDTH - width)
        if all(left > end + 4 or left + width < start - 4 for start, end in taken):  # labels must not overlap
            label = f'<text class="mark-label" x="{left:.1f}" y="{top - 9}">{escape(mark.label)}</text>'
            taken.append((left, left + width))
        parts.append(
            f'<g class="mark"><title>{escape(mark.text)}</title>{label}'
            f'<path d="M{at - 4:.1f} {top - 6}h8l-4 6z"/>'
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{HEIGHT - _BOTTOM}"/></g>'
        )
    return parts


def _line(line: Line, x: Axis, y: Axis) -> str:
    colour = f"c{line.colour % _NUM_COLOURS}"
    parts = []
    faint = " old" if line.old else f" raw{' dense' if len(line.points) > _DENSE else ''}" if line.trend else ""
    if len(line.points) == 1 or line.dots or not line.joined:
        dots = "".join(f'<circle cx="{x.position(a):.1f}" cy="{y.position(b):.1f}" r="2.6"/>' for a, b in line.points)
        parts.append(f'<g class="dots {colour}{faint}">{dots}</g>')
    if line.joined:
        parts.append(f'<path class="line {colour}{faint}" d="{_path(line.points, x, y)}"/>')
    if line.trend:
        parts.append(f'<path class="line {colour}" d="{_path(line.trend, x, y)}"/>')
    if line.old:
        return "".join(parts)
    values = {"name": line.name, "x": [_short(a) for a, _ in line.points], "y": [_short(b) for _, b in line.points]}
    data = escape(json.dumps(values, separators=(",", ":")))
    return f'<g class="series" data-colour="{colour}" data-values="{data}">{"".join(parts)}</g>'


def _path(points: Sequence[Point], x: Axis, y: Axis) -> str:
    coordinates = (f"{x.position(a):.1f} {y.position(b):.1f}" for a, b in points)
    return "M" + "L".join(coordinates)


def _short(value: float) -> float:
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    digits = 5 - math.floor(math.log10(abs(value)))
    return round(value, digits) if abs(digits) < 300 else value


def _legend(chart: Chart) -> str:
    items = []
    for line in chart.lines:
        if line.old or not line.points:
            continue
        last = f"<b>{escape(format_number((line.trend or line.points)[-1][1]))}</b>"
        last += escape(f" {chart.unit}" if chart.unit else "") + (" smoothed" if line.trend else "")
        items.append(f'<li><i class="swatch c{line.colour % _NUM_COLOURS}"></i>{escape(line.name)} {last}</li>')
    if chart.marks:
        items.append('<li class="mark"><i>▾</i> faults</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _described(chart: Chart, y: Axis) -> str:
    sentences = []
    for line in chart.lines:
        if line.old or not line.points:
            continue
        values = [value for _, value in line.points]
        (first_x, first), (last_x, last) = line.points[0], line.points[-1]
        sentences.append(
            f"{line.name}: {format_number(first)} at {chart.x_name} {format_number(first_x)}, "
            f"{format_number(last)} at {chart.x_name} {format_number(last_x)}, "
            f"lowest {format_number(min(values))}, highest {format_number(max(values))}."
        )
    return " ".join(sentences) + (" The vertical axis is logarithmic." if y.log else "")
