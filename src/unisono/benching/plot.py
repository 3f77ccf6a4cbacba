"""Draws a benchmark as an SVG image without scripts: throughput by number of ranks, and the parts of a step."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from unisono.benching.result import Bench, Row
from unisono.benching.tables import title_of
from unisono.formatting import format_number, format_rate, shorten
from unisono.pages.axis import Axis, linear

_WIDTH, _HEIGHT = 900, 360
_TOP, _BOTTOM = 64, 306
_THROUGHPUT = (70, 440)  # left and right edge of the panels
_PARTS = (560, 870)
_UNISONO, _HAND, _IDEAL = "#3f51b5", "#d9822b", "#8a8f98"
_COLOURS = {"compute": "#3f51b5", "communication": "#d9822b", "data wait": "#8a8f98"}
_STYLE = (
    "svg{background:#fff;font:13px system-ui,sans-serif}text{fill:#24292f}.small{font-size:11px;fill:#57606a}"
    ".title{font-size:15px;font-weight:600}.grid{stroke:#e4e7eb}.axis{stroke:#57606a}"
)


def draw(bench: Bench) -> str:
    """Returns the content of bench.svg."""
    title = title_of(bench)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style><title>{escape(title)}</title>",
        f'<text class="title" x="20" y="26">{escape(shorten(title, 110))}</text>',
        *_throughput(bench.rows),
        *_step_parts(bench.rows),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _throughput(rows: Sequence[Row]) -> list[str]:
    left, right = _THROUGHPUT
    ideal = [rows[0].samples_per_s.median * row.ranks / rows[0].ranks for row in rows]
    by_hand = {row.ranks: _rate_by_hand(row) for row in rows if row.overhead is not None}
    most = max([*ideal, *(row.samples_per_s.high for row in rows), *by_hand.values()])
    y = linear(0.0, most, _BOTTOM, _TOP)
    x = linear(0.0, rows[-1].ranks * 1.1, left, right, tight=True)
    parts = [*_grid(y, left, right), f'<text x="{left}" y="{_TOP - 14}">samples per second</text>']
    points = " ".join(
        f"{x.position(row.ranks):.1f},{y.position(rate):.1f}" for row, rate in zip(rows, ideal, strict=True)
    )
    parts.append(f'<polyline points="{points}" fill="none" stroke="{_IDEAL}" stroke-dasharray="5 4"/>')
    points = " ".join(f"{x.position(r.ranks):.1f},{y.position(r.samples_per_s.median):.1f}" for r in rows)
    parts.append(f'<polyline points="{points}" fill="none" stroke="{_UNISONO}" stroke-width="2"/>')
    for row in rows:
        at, rate = x.position(row.ranks), row.samples_per_s
        ends = (y.position(rate.low), y.position(rate.high))
        parts.append(f'<text class="small" x="{at:.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{row.ranks}</text>')
        if row.ranks in by_hand:
            height = y.position(by_hand[row.ranks])
            parts.append(
                f'<path d="M{at - 6:.1f} {height:.1f}h12" stroke="{_HAND}" stroke-width="3"/>'
                f"<!-- by hand, {row.ranks}: {format_rate(by_hand[row.ranks])} -->"
            )
        parts.append(
            f'<g stroke="{_UNISONO}" fill="{_UNISONO}"><line x1="{at:.1f}" x2="{at:.1f}" y1="{ends[0]:.1f}" '
            f'y2="{ends[1]:.1f}" stroke-width="2"/>'
            f'<circle cx="{at:.1f}" cy="{y.position(rate.median):.1f}" r="3.5"/></g>'
            f'<text x="{at - 8:.1f}" y="{y.position(rate.median) - 8:.1f}" text-anchor="end">{format_rate(rate.median)}'
            "</text>"
        )
    middle = (left + right) / 2
    parts.append(f'<text class="small" x="{middle}" y="{_BOTTOM + 34}" text-anchor="middle">ranks</text>')
    names = {"unisono": _UNISONO, "linear scaling": _IDEAL} | ({"by hand": _HAND} if by_hand else {})
    return [*parts, *_legend(names, left)]


def _step_parts(rows: Sequence[Row]) -> list[str]:
    """Draws horizontal bars that show the mean step time and its parts."""
    left, right = _PARTS
    most = max(row.step_ms.median for row in rows)
    space = (_BOTTOM - _TOP) / len(rows)
    height = min(34.0, 0.6 * space)
    parts = [f'<text x="{left}" y="{_TOP - 14}">milliseconds per step</text>']
    for number, row in enumerate(rows):
        top, at = _TOP + space * number + (space - height) / 2, float(left)
        middle = f"{top + height / 2:.1f}"
        shares = {"communication": row.comm_share, "data wait": row.data_wait_share}
        shares = {"compute": max(0.0, 1 - sum(shares.values())), **shares}
        ranks = f"{row.ranks} rank{'s' * (row.ranks > 1)}"
        parts.append(f'<text x="{left - 10}" y="{middle}" dy=".35em" text-anchor="end">{ranks}</text>')
        for name, share in shares.items():
            width = share * row.step_ms.median / most * (right - left - 60)
            label = f"{ranks}, {name}: {share:.1%}"
            parts.append(
                f'<rect x="{at:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{_COLOURS[name]}">'
                f"<title>{label}</title></rect>"
            )
            at += width
        step = format_number(row.step_ms.median, 3)
        parts.append(f'<text x="{at + 6:.1f}" y="{middle}" dy=".35em">{step}</text>')
    return [*parts, *_legend(_COLOURS, left)]


def _rate_by_hand(row: Row) -> float:
    assert row.overhead is not None
    return 1e3 * row.global_batch / row.overhead.hand_step_ms.median


def _grid(y: Axis, left: float, right: float) -> list[str]:
    parts = []
    for value, label in y.ticks:
        at = f"{y.position(value):.1f}"
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="small" x="{left - 8}" y="{at}" dy=".35em" text-anchor="end">{label}</text>')
    return [*parts, f'<line class="axis" x1="{left}" x2="{right}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>']


def _legend(names: dict[str, str], left: float) -> list[str]:
    parts, at = [], left
    for name, colour in names.items():
        parts.append(f'<rect x="{at:.0f}" y="{_HEIGHT - 16}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text class="small" x="{at + 15:.0f}" y="{_HEIGHT - 7}">{escape(name)}</text>')
        at += 30 + 7 * len(name)
    return parts
