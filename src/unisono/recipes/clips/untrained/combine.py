"""Turns the measurements of a video's clips into scores.

Each measurement is compared with the rest of the same video, as the distance above the video's median in units of the
typical deviation. A quiet talk and a loud match are therefore scored alike, and events that last throughout a video do
not stand out. A part's value grows from 0 (the median or below) towards 1; the score is the values' weighted mean.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.clips.cutting.moments import Moment
from unisono.recipes.clips.scoring import Scored
from unisono.recipes.clips.untrained.parts import PARTS, Part

_TYPICAL = 1.4826  # standard deviation divided by median absolute deviation, for a normal distribution
_HALF_WAY = 4.0  # number of deviations above the median at which the value is 1 - 1/e
_NEIGHBOURS = np.array([0.25, 0.5, 0.25])  # smoothing weights, because a highlight rarely fits exactly into one clip

Floats = NDArray[np.float64]


def contributions(measured: Mapping[str, Floats]) -> dict[str, Floats]:
    """Returns each measured part's contribution to each clip's score; contributions add up to the score (0 to 1)."""
    parts = [part for part in PARTS if part.name in measured]
    total = sum(part.weight for part in parts)
    return {part.name: part.weight / total * _smoothed(_value(measured[part.name], part)) for part in parts}


def _value(measured: Floats, part: Part) -> Floats:
    if not len(measured):
        return measured
    above = measured - np.median(measured)
    spread = max(_TYPICAL * float(np.median(np.abs(above))), part.least_spread)
    return np.asarray(1 - np.exp(-np.maximum(above, 0) / spread / _HALF_WAY))


def _smoothed(values: Floats) -> Floats:
    if len(values) < 2:
        return values
    padded = np.concatenate([values[:1], values, values[-1:]])
    return np.convolve(padded, _NEIGHBOURS, mode="valid")


def shares_of(moment: Moment, scored: Scored) -> dict[str, float]:
    """Returns each part's share of a moment's score, largest first; empty without parts or if the score is 0."""
    number = len(scored.scores)
    times = np.arange(number) * scored.clip_seconds
    ends = np.minimum(times + scored.clip_seconds, moment.end)
    seconds = np.clip(ends - np.maximum(times, moment.start), 0, None)
    sums = {name: float(values @ seconds) for name, values in scored.parts.items()}
    total = sum(sums.values())
    if total <= 0:
        return {}
    return {name: value / total for name, value in sorted(sums.items(), key=lambda item: (-item[1], item[0]))}
