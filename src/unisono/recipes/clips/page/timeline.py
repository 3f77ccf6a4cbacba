"""Lays out the timeline on a page: the score curve, bands for the clips, thumbnails and the time axis.

Positions along the time axis are percentages of the width and everything else is in pixels, so the timeline fits any
screen width and its text has the same size on a phone as on a large screen. `page.html` draws it as SVG.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.formatting import format_clock, format_count
from unisono.recipes.clips.cutting.moments import Moment
from unisono.recipes.clips.remarks import format_score
from unisono.recipes.clips.video.footage import Footage

_CURVE_TOP, _CURVE_HEIGHT, _AXIS_HEIGHT = 34, 130, 22
_STRIP_TOP = _CURVE_TOP + _CURVE_HEIGHT + 6
_CURVE_WIDTH = 10_000  # units of the curve's viewBox along the time axis
_MOST_POINTS = 1000
_TICK_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 36000)


def timeline(
    footage: Footage,
    scores: NDArray[np.float64],
    clip_seconds: float,
    moments: Sequence[Moment],
    thumbnails: tuple[Sequence[str], int],
) -> dict[str, Any]:
    """Returns the positions and labels that `page.html` draws; `thumbnails` holds images and their height in pixels."""
    duration = max(footage.duration, 1e-3)
    pictures, strip_height = thumbnails if any(thumbnails[0]) else ([], 0)
    low, high = score_axis(scores)
    axis_top = _STRIP_TOP + strip_height
    return {
        "duration": duration,
        "height": axis_top + _AXIS_HEIGHT,
        "label": _description(scores, moments),
        "band_top": _CURVE_TOP - 6,
        "band_height": _CURVE_HEIGHT + 6,
        "bands": [_band(number, moment, duration) for number, moment in enumerate(moments, 1)],
        "curve_top": _CURVE_TOP,
        "curve_height": _CURVE_HEIGHT,
        "curve_width": _CURVE_WIDTH,
        "curves": _curves(scores, clip_seconds, duration, low, high),
        "score_ticks": [
            {"y": round(_CURVE_TOP + _CURVE_HEIGHT * (1 - part), 1), "label": f"{low + part * (high - low):.2f}"}
            for part in (0, 0.5, 1)
        ],
        "strip_top": _STRIP_TOP,
        "strip_height": strip_height,
        "thumbnail_width": round(100 / max(1, len(pictures)) - 0.15, 2),
        # On a narrow screen, a landscape thumbnail is cropped at its sides; a portrait thumbnail still has margins.
        "thumbnail_fit": "slice" if footage.height <= footage.width * footage.pixel_aspect else "meet",
        "thumbnails": [
            {"left": round(100 * number / len(pictures), 2), "picture": picture, "wide_screens_only": number % 2}
            for number, picture in enumerate(pictures)
            if picture
        ],
        "axis_top": axis_top,
        "time_ticks": _time_ticks(duration),
    }


def score_axis(scores: NDArray[np.float64]) -> tuple[float, float]:
    """Returns the range of the y axis: 0 to the next tenth if scores are between 0 and 1, otherwise their range."""
    finite = scores[np.isfinite(scores)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if low >= 0 and high <= 1:
        return 0.0, max(1, math.ceil(10 * high - 1e-9)) / 10
    return (low, high) if high - low > 1e-3 else (low - 0.5, high + 0.5)


def _band(number: int, moment: Moment, duration: float) -> dict[str, Any]:
    left, right = (100 * min(1.0, time / duration) for time in (moment.start, moment.end))
    span = f"{format_clock(moment.start)} to {format_clock(moment.end)}"
    return {
        "moment": moment,
        "label": f"Clip {number}: {span}, score {format_score(moment.score)}",
        "left": round(left, 2),
        "width": round(max(0.3, right - left), 2),
        "middle": round(min(max((left + right) / 2, 1), 99), 2),
    }


def _curves(
    scores: NDArray[np.float64], clip_seconds: float, duration: float, low: float, high: float
) -> list[tuple[str, str]]:
    """Returns SVG paths of the area under the curve and of the curve, one pair per stretch of clips with scores.

    If there are many clips, the curve shows the maximum of each group of neighbouring clips.
    """
    group_size = -(-len(scores) // _MOST_POINTS) or 1
    stretches: list[list[tuple[float, float]]] = [[]]
    for first in range(0, len(scores), group_size):
        group = scores[first : first + group_size]
        finite = group[np.isfinite(group)]
        if not len(finite):
            stretches.append([])
            continue
        middle = min((first + len(group) / 2) * clip_seconds, duration)
        y = _CURVE_HEIGHT * (high - float(finite.max())) / (high - low)
        stretches[-1].append((_CURVE_WIDTH * middle / duration, y))
    half = _CURVE_WIDTH * group_size * clip_seconds / duration / 2
    paths = []
    for stretch in filter(None, stretches):
        # Each point is in the middle of its clip. Extends the curve to the start of the first and the end of the last
        # clip.
        (left, first_y), (right, last_y) = stretch[0], stretch[-1]
        points = [(max(0.0, left - half), first_y), *stretch, (min(_CURVE_WIDTH, right + half), last_y)]
        line = "L".join(f"{x:.0f} {y:.1f}" for x, y in points)
        area = f"M{points[0][0]:.0f} {_CURVE_HEIGHT}L{line}L{points[-1][0]:.0f} {_CURVE_HEIGHT}z"
        paths.append((area, f"M{line}"))
    return paths


def _time_ticks(duration: float) -> list[dict[str, Any]]:
    """Returns the labels of the time axis; a phone shows every second label."""
    step = next((step for step in _TICK_SECONDS if duration / step <= 10), _TICK_SECONDS[-1])
    positions = [100 * number * step / duration for number in range(int(duration / step) + 1)]
    return [
        {
            "x": round(x, 2),
            "label": format_clock(number * step),
            "anchor": "start" if x < 2 else "end" if x > 97 else "middle",
            "wide_screens_only": number % 2,
        }
        for number, x in enumerate(positions)
    ]


def _description(scores: NDArray[np.float64], moments: Sequence[Moment]) -> str:
    finite = scores[np.isfinite(scores)]
    spread = f", from {format_score(finite.min())} to {format_score(finite.max())}" if len(finite) else ""
    return f"The score over time{spread}, with {format_count(len(moments), 'clip')} marked."
