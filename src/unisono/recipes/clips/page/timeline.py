"""The timeline of a page as SVG: the curve of scores, bands for the clips, thumbnails and the time axis.

Positions along the time axis are percentages of the width and everything else is in pixels, so the timeline fits any
screen width and its text has the same size on a phone as on a large screen.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from unisono.formatting import format_clock, format_count
from unisono.recipes.clips.cutting.moments import Moment
from unisono.recipes.clips.remarks import score
from unisono.recipes.clips.video.footage import Footage

_CURVE_TOP, _CURVE, _AXIS = 34, 130, 22
_BOTTOM = _CURVE_TOP + _CURVE
_USUAL_WIDTH = 1120  # pixels, on a large screen
_NUM_THUMBNAILS = 12
_MOST_POINTS = 1000
_FINE = 10_000  # units of the curve's viewBox along the time axis
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 36000)


def timeline(
    footage: Footage, scores: NDArray[np.float64], clip_seconds: float, moments: Sequence[Moment], source: str
) -> str:
    """Returns the timeline of a video as SVG; `source` is the URL of the video."""
    duration = max(footage.duration, 1e-3)
    pictures, strip_height = _strip(footage, _BOTTOM + 6)
    height = _BOTTOM + 6 + strip_height + _AXIS
    low, high = axis(scores)
    lines, numbers = _grid(low, high)
    parts = [
        f'<svg class="timeline" width="100%" height="{height}" data-duration="{duration:.3f}" role="group" '
        f'aria-label="{escape(_described(scores, moments))}">',
        *lines,
        *(_band(number, moment, duration, source) for number, moment in enumerate(moments, 1)),
        f'<svg x="0" y="{_CURVE_TOP}" width="100%" height="{_CURVE}" viewBox="0 0 {_FINE} {_CURVE}" '
        'preserveAspectRatio="none" overflow="visible">',
        *_curve(scores, clip_seconds, duration, low, high),
        "</svg>",
        *numbers,
        *pictures,
        *_ticks(duration, height),
        f'<line class="head" y1="{_CURVE_TOP - 6}" y2="{height - _AXIS}" visibility="hidden"/></svg>',
    ]
    return "\n".join(parts)


def axis(scores: NDArray[np.float64]) -> tuple[float, float]:
    """The range of the y axis: for scores within 0 to 1, from 0 to the next tenth; otherwise their own range."""
    finite = scores[np.isfinite(scores)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if low >= 0 and high <= 1:
        return 0.0, max(1, math.ceil(10 * high - 1e-9)) / 10
    return (low, high) if high - low > 1e-3 else (low - 0.5, high + 0.5)


def _band(number: int, moment: Moment, duration: float, source: str) -> str:
    left, right = (100 * min(1.0, time / duration) for time in (moment.start, moment.end))
    middle = min(max((left + right) / 2, 1), 99)
    label = f"Clip {number}: {format_clock(moment.start)} to {format_clock(moment.end)}, score {score(moment.score)}"
    return (
        f'<a class="band" href="{at(source, moment)}" {data(moment)} aria-label="{label}"><title>{label}</title>'
        f'<rect x="{left:.2f}%" y="{_CURVE_TOP - 6}" width="{max(0.3, right - left):.2f}%" '
        f'height="{_BOTTOM - _CURVE_TOP + 6}" rx="3"/><circle cx="{middle:.2f}%" cy="14" r="11"/>'
        f'<text x="{middle:.2f}%" y="14" dy=".36em" text-anchor="middle">{number}</text></a>'
    )


def _grid(low: float, high: float) -> tuple[list[str], list[str]]:
    """The grid lines, and their labels, which are drawn above everything else."""
    lines, numbers = [], []
    for value in (low, (low + high) / 2, high):
        y = _BOTTOM - _CURVE * (value - low) / (high - low)
        lines.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        numbers.append(f'<text class="tick" x="3" y="{y - 3:.1f}">{value:.2f}</text>')
    return lines, numbers


def _curve(scores: NDArray[np.float64], clip_seconds: float, duration: float, low: float, high: float) -> list[str]:
    """The line and the area under it, with gaps where there is no score; many clips are reduced to their maxima."""
    every = -(-len(scores) // _MOST_POINTS) or 1
    runs: list[list[tuple[float, float]]] = [[]]
    for first in range(0, len(scores), every):
        group = scores[first : first + every]
        finite = group[np.isfinite(group)]
        if not len(finite):
            runs.append([])
            continue
        middle = min((first + len(group) / 2) * clip_seconds, duration)
        runs[-1].append((_FINE * middle / duration, _CURVE * (high - float(finite.max())) / (high - low)))
    parts = []
    for run in filter(None, runs):
        # Extends the run to its ends: otherwise the curve of a short video would start in its middle.
        half = _FINE * every * clip_seconds / duration / 2
        points = [(max(0.0, run[0][0] - half), run[0][1]), *run, (min(_FINE, run[-1][0] + half), run[-1][1])]
        line = "L".join(f"{x:.0f} {y:.1f}" for x, y in points)
        parts.append(f'<path class="area" d="M{points[0][0]:.0f} {_CURVE}L{line}L{points[-1][0]:.0f} {_CURVE}z"/>')
        parts.append(f'<path class="curve" d="M{line}"/>')
    return parts


def _strip(footage: Footage, top: int) -> tuple[list[str], int]:
    """The thumbnails along the timeline and their height; a phone shows every second one, twice as wide."""
    each = _USUAL_WIDTH / _NUM_THUMBNAILS
    shape = footage.height / max(1.0, footage.width * footage.pixel_aspect)
    height = round(min(each * shape, 90))
    width = min(each - 2, height / shape)
    # On a narrow screen, a landscape thumbnail is cropped at its sides; a portrait one has margins left.
    fit = "slice" if shape <= 1 else "meet"
    parts = []
    for number in range(_NUM_THUMBNAILS):
        time = footage.duration * (number + 0.5) / _NUM_THUMBNAILS
        picture = jpeg(footage.picture_at(time, (max(2, round(width * 2)), max(2, height * 2)), roughly=True))
        if picture:
            parts.append(
                f'<image{_seldom(number)} x="{100 * number / _NUM_THUMBNAILS:.2f}%" y="{top}" '
                f'width="{100 / _NUM_THUMBNAILS - 0.15:.2f}%" height="{height}" preserveAspectRatio="xMidYMid {fit}" '
                f'href="{picture}"/>'
            )
    return parts, height if parts else 0


def _ticks(duration: float, height: int) -> list[str]:
    """The labels of the time axis; a phone shows every second one."""
    step = next((step for step in _STEPS if duration / step <= 10), _STEPS[-1])
    parts = []
    for number in range(int(duration / step) + 1):
        x = 100 * number * step / duration
        anchor = "start" if x < 2 else "end" if x > 97 else "middle"
        top = height - _AXIS
        parts.append(
            f'<g{_seldom(number)}><line class="axis" x1="{x:.2f}%" x2="{x:.2f}%" y1="{top}" y2="{top + 5}"/>'
            f'<text x="{x:.2f}%" y="{height - 4}" text-anchor="{anchor}">{format_clock(number * step)}</text></g>'
        )
    return parts


def _seldom(number: int) -> str:
    return ' class="seldom"' if number % 2 else ""


def _described(scores: NDArray[np.float64], moments: Sequence[Moment]) -> str:
    finite = scores[np.isfinite(scores)]
    spread = f", from {score(finite.min())} to {score(finite.max())}" if len(finite) else ""
    return f"The score over time{spread}, with {format_count(len(moments), 'clip')} marked."


def data(moment: Moment) -> str:
    """The `data-` attributes of a link to a moment, which the page's script reads."""
    return f'data-start="{moment.start:.3f}" data-end="{moment.end:.3f}"'


def at(source: str, moment: Moment) -> str:
    """The URL of a moment in the video."""
    return f"{source}#t={moment.start:.3f},{moment.end:.3f}"


def jpeg(picture: NDArray[np.uint8] | None) -> str:
    """Returns an image as a data URL; empty when there is no image."""
    if picture is None:
        return ""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
