"""Finds good cut points near the ends of a moment: scene cuts, and pauses in the sound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.clips.cutting.moments import Moment
from unisono.recipes.clips.video.footage import Footage

_BINS = 8  # bins per channel of a colour histogram
_BLOCKS = 4  # frames are also compared by the means of 4×4 blocks, because two shots may have the same colours
_CHANGE = 0.15  # minimum change at a cut, as a fraction of the largest possible difference
_ABOVE_AROUND = 4.0  # minimum change at a cut, relative to the median change around it
_AROUND = 12  # number of changes before and after a cut in that median, which rules out a shaking camera
_LOUD_QUANTILE, _PAUSE_BELOW = 0.9, 0.1  # a pause is quieter than this fraction of the loud parts
_SHORTEST_PAUSE = 0.15  # seconds
_QUIETEST = 1e-4  # relative to full scale; sound that is quieter throughout has no pauses
_STEP = 0.02  # seconds between two measurements of the loudness
_SIZE = (48, 27)  # width and height at which frames are compared
_RATE = 16_000


@dataclass(frozen=True)
class Edge:
    """A cut point: its time in seconds, its kind and its strength."""

    time: float
    kind: Literal["shot", "silence"]
    strength: float


def shots(frames: NDArray[np.uint8], times: NDArray[np.float64]) -> list[Edge]:
    """Finds the scene cuts in small frames [N, height, width, 3], each at the time of the new shot's first frame.

    If a frame differs from both neighbours but these are similar to each other, it is a flash and not a cut.
    """
    looks = np.stack([_look(frame) for frame in frames]) if len(frames) else np.zeros((0, 1))
    steps = _differences(looks, 1)  # steps[i] is the difference between frames i and i + 1
    double_steps = _differences(looks, 2)
    cuts = []
    for at in np.flatnonzero(steps > _CHANGE):
        around = np.concatenate([steps[max(0, at - _AROUND) : at], steps[at + 1 : at + 1 + _AROUND]])
        is_shaking = len(around) and steps[at] < _ABOVE_AROUND * np.median(around)
        is_largest = steps[at] >= steps[max(0, at - 2) : at + 3].max()
        is_flash = min(double_steps[max(0, at - 1) : at + 1], default=math.inf) < 0.5 * steps[at]
        if is_largest and not is_shaking and not is_flash:
            cuts.append(Edge(float(times[at + 1]), "shot", float(steps[at])))
    return cuts


def silences(loudness: NDArray[np.floating], times: NDArray[np.float64]) -> list[Edge]:
    """Finds the middle of each pause, from the loudness (root mean square, full scale 1) at evenly spaced times."""
    if len(loudness) < 2:
        return []
    loud = float(np.quantile(loudness, _LOUD_QUANTILE))
    if loud < _QUIETEST:
        return []
    quiet = np.concatenate([[False], loudness < _PAUSE_BELOW * loud, [False]])
    begins, ends = np.flatnonzero(~quiet[:-1] & quiet[1:]), np.flatnonzero(quiet[:-1] & ~quiet[1:])
    step = float(times[1] - times[0])
    pauses = [(begin, end) for begin, end in zip(begins, ends, strict=True) if (end - begin) * step >= _SHORTEST_PAUSE]
    return [
        Edge(float(times[begin] + (end - begin) * step / 2), "silence", float((end - begin) * step))
        for begin, end in pauses
    ]


def edges_around(video: Path | Footage, moments: Sequence[Moment], within_s: float) -> list[Edge]:
    """Finds the edges within `within_s` seconds of the moments' ends; reads only these parts of the video."""
    footage = video if isinstance(video, Footage) else Footage(video)
    edges: set[Edge] = set()
    for time in sorted({end for moment in moments for end in (moment.start, moment.end)}):
        start, end = max(0.0, time - within_s), min(footage.duration, time + within_s)
        if end - start < 2 * _STEP:
            continue
        # Reads half a second more on both sides, because a change is compared with the frames around it.
        wide_start, wide_end = max(0.0, start - 0.5), min(footage.duration, end + 0.5)
        frames = [(time, footage.picture(frame, _SIZE)) for time, frame in footage.frames(wide_start, wide_end)]
        nearby: list[Edge] = []
        if frames:
            nearby += shots(np.stack([picture for _, picture in frames]), np.array([time for time, _ in frames]))
        if footage.has_sound:
            nearby += silences(*_loudness(footage, wide_start, wide_end))
        edges |= {edge for edge in nearby if start <= edge.time <= end}
    return sorted(edges, key=lambda edge: edge.time)


def snap(
    moments: Sequence[Moment],
    edges: Sequence[Edge],
    within_s: float,
    *,
    shortest: float = 0.0,
    longest: float = math.inf,
    duration: float = math.inf,
) -> list[Moment]:
    """Moves each end of a moment to a scene cut, or otherwise to a pause, at most `within_s` seconds away.

    `moments` are sorted, best first. If two moments then overlap, the one with the lower score is shortened, or dropped
    if it would become too short. The result for fewer moments is therefore a prefix of the result for more moments. If
    moving one end makes a moment too short, the other end moves too. An end that cannot move without an overlap or an
    invalid length stays where it is.
    """
    placed: list[Moment] = []
    for moment in moments:
        middle = (moment.start + moment.end) / 2
        low = max((other.end for other in placed if other.end <= middle), default=0.0)
        high = min((other.start for other in placed if other.start >= middle), default=duration)
        if any(other.start < middle < other.end for other in placed):
            continue
        least = min(shortest, moment.seconds)
        room = _Room(low, high, least, max(longest, moment.seconds))
        fitted = room.fitted(moment.start, moment.end, keep_start=moment.start >= low)
        if fitted is None:
            continue
        start, end = fitted
        start_is_at_edge = False  # if True, moving the end must not move the start away from its edge
        for bound in (moment.start, moment.end):
            is_start = bound == moment.start
            near = [edge for edge in edges if abs(edge.time - bound) <= within_s and low <= edge.time <= high]
            for edge in sorted(near, key=lambda edge: (edge.kind != "shot", abs(edge.time - bound), edge.time)):
                ends = (edge.time, end) if is_start else (start, edge.time)
                moved = room.fitted(*ends, keep_start=is_start)
                if moved is not None and (is_start or not start_is_at_edge or moved[0] == start):
                    start, end = moved
                    start_is_at_edge = is_start
                    break
        placed.append(replace(moment, start=start, end=end))
    return placed


@dataclass(frozen=True)
class _Room:
    """The time range that a moment must stay in, and its minimum and maximum length."""

    low: float
    high: float
    least: float
    most: float

    def fitted(self, start: float, end: float, *, keep_start: bool) -> tuple[float, float] | None:
        """Fits a moment into the range; if it becomes too short, extends it at an end that may move."""
        start, end = max(start, self.low), min(end, self.high)
        lacking = self.least - (end - start)
        if lacking > self.least / 2:  # less than half of the minimum length is inside the range
            return None
        if lacking > 1e-9:
            start, end = (start, end + lacking) if keep_start else (start - lacking, end)
        inside = self.low - 1e-9 <= start < end <= self.high + 1e-9
        return (start, end) if inside and end - start <= self.most + 1e-9 else None


def _look(frame: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Describes a frame by colour histograms and the brightness of blocks, which change little if objects move."""
    pixels = frame.reshape(-1, 3)
    bins = pixels // (256 // _BINS)
    colours = [np.bincount(bins[:, channel], minlength=_BINS) / len(bins) for channel in range(3)]
    luma = frame.mean(axis=2)
    rows = [part for row in np.array_split(luma, _BLOCKS) for part in np.array_split(row, _BLOCKS, axis=1)]
    # Scales both parts so that the difference between two frames is from 0 to 1 in each.
    return np.concatenate([np.concatenate(colours) / 3 / 2, np.array([part.mean() for part in rows]) / 255 / len(rows)])


def _differences(looks: NDArray[np.float64], apart: int) -> NDArray[np.float64]:
    change = np.abs(looks[apart:] - looks[:-apart]) if len(looks) > apart else np.zeros((0, looks.shape[1]))
    colours = 3 * _BINS
    return np.asarray(np.maximum(change[:, :colours].sum(axis=1), change[:, colours:].sum(axis=1)))


def _loudness(footage: Footage, start: float, end: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    sound: NDArray[np.float64] = np.concatenate([part[0] for part in footage.sound(start, end, _RATE, "mono")]).astype(
        np.float64
    )
    step = round(_STEP * _RATE)
    steps = sound[: len(sound) // step * step].reshape(-1, step)
    return np.sqrt((steps**2).mean(axis=1)), start + np.arange(len(steps), dtype=np.float64) * _STEP
