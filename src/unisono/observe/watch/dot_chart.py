"""Draws a curve with characters: eight dots per cell in braille, or an asterisk where braille cannot be shown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from unisono.formatting import format_number
from unisono.pages.axis import spans_decades

Point = tuple[float, float]
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of each dot, by row and column of a cell


def dot_chart(points: Sequence[Point], width: int, height: int, *, braille: bool = True) -> list[str]:
    """Returns `height` lines of `width` characters with a curve and the labels of its axis; empty if that is too small.

    The axis is logarithmic if the values span several decades.
    """
    if len(points) < 2 or height < 2:
        return []
    low, high = min(y for _, y in points), max(y for _, y in points)
    log = spans_decades(low, high)
    labels = [format_number(high, 3), format_number(low, 3)]
    room = max(map(len, labels)) + 1
    if width < room + 8:
        return []
    cells = _cells(points, width - room, height, low, high, log)
    rows = ["".join(_character(bits, braille) for bits in row) for row in cells]
    marks = [labels[0], *[""] * (height - 2), labels[1]]
    return [f"{mark:>{room - 1}} {row}" for mark, row in zip(marks, rows, strict=True)]


def _cells(points: Sequence[Point], width: int, height: int, low: float, high: float, log: bool) -> list[list[int]]:
    cells = [[0] * width for _ in range(height)]
    columns, rows = 2 * width, 4 * height
    first, last = points[0][0], points[-1][0]

    def scaled(y: float) -> float:
        return math.log10(max(y, 1e-300)) if log else y

    bottom, top = scaled(low), scaled(high)
    before: tuple[int, int] | None = None
    for x, y in points:
        column = round((x - first) / (last - first) * (columns - 1)) if last > first else 0
        row = round((top - scaled(y)) / (top - bottom) * (rows - 1)) if top > bottom else rows // 2
        start, above = before or (column, row), (before or (column, row))[1]
        for at in range(start[0], column + 1):  # joins the points by a line
            fraction = (at - start[0]) / (column - start[0]) if column > start[0] else 1.0
            here = round(start[1] + fraction * (row - start[1]))
            for each in range(min(above, here), max(above, here) + 1):
                cells[each // 4][at // 2] |= _DOTS[each % 4][at % 2]
            above = here
        before = column, row
    return cells


def _character(bits: int, braille: bool) -> str:
    if not bits:
        return " "
    return chr(0x2800 + bits) if braille else "*"
