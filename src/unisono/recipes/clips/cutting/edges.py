"""Places where a cut does not hurt: where the shot changes, and where the sound pauses."""

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

_BINS = 8  # of a colour's histogram
_BLOCKS = 4  # a picture is also compared by the mean of 4×4 blocks: two shots may have the same colours
_CHANGE = 0.15  # of the largest possible difference; slower changes are no cut
_ABOVE_AROUND = 4.0  # times the difference that pictures around it have: a shaking camera is no series of cuts
_AROUND = 12  # pictures
_LOUD, _PAUSE_BELOW = 0.9, 0.1  # a pause is this share of what is loud here, and
_SHORTEST_PAUSE = 0.15  # seconds long
_QUIETEST = 1e-4  # of full scale; what is never louder has no pauses
_STEP = 0.02  # seconds
_SIZE = (48, 27)  # width and height at which pictures are compared
_RATE = 16_000


@dataclass(frozen=True)
class Edge:
    """A place to cut: its time in seconds, what is there, and how clear it is."""

    time: float
    kind: Literal["shot", "silence"]
    strength: float


def shots(frames: NDArray[np.uint8], times: NDArray[np.float64]) -> list[Edge]:
    """Where the shot changes, from small pictures [N, height, width, 3]: the time of the first picture of the new one.

    A picture that is unlike both its neighbours, which are like each other, is a flash and no cut.
    """
    looks = np.stack([_look(frame) for frame in frames]) if len(frames) else np.zeros((0, 1))
    steps = _differences(looks, 1)  # steps[i]: from picture i to i + 1
    over_one = _differences(looks, 2)
    found = []
    for at in np.flatnonzero(steps > _CHANGE):
        around = np.concatenate([steps[max(0, at - _AROUND) : at], steps[at + 1 : at + 1 + _AROUND]])
        if len(around) and steps[at] < _ABOVE_AROUND * np.median(around):
            continue
        if steps[at] < steps[max(0, at - 2) : at + 3].max():
            continue
        across = [*over_one[max(0, at - 1) : at], *over_one[at : at + 1]]
        if across and min(across) < 0.5 * steps[at]:
            continue
        found.append(Edge(float(times[at + 1]), "shot", float(steps[at])))
    return found


def silences(loudness: NDArray[np.floating], times: NDArray[np.float64]) -> list[Edge]:
    """The middles of pauses, from loudness (root mean square, full scale 1) at times that follow each other evenly."""
    if len(loudness) < 2:
        return []
    loud = float(np.quantile(loudness, _LOUD))
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
    """The edges near the ends of the moments; only those stretches of the video are read."""
    footage = video if isinstance(video, Footage) else Footage(video)
    found: set[Edge] = set()
    for place in sorted({end for moment in moments for end in (moment.start, moment.end)}):
        start, end = max(0.0, place - within_s), min(footage.duration, place + within_s)
        if end - start < 2 * _STEP:
            continue
        # A change is judged by what is around it: half a second more is looked at, and left out again.
        wide_start, wide_end = max(0.0, start - 0.5), min(footage.duration, end + 0.5)
        seen = [(time, footage.picture(frame, _SIZE)) for time, frame in footage.frames(wide_start, wide_end)]
        edges = shots(np.stack([picture for _, picture in seen]), np.array([time for time, _ in seen])) if seen else []
        if footage.has_sound:
            edges += silences(*_loudness(footage, wide_start, wide_end))
        found |= {edge for edge in edges if start <= edge.time <= end}
    return sorted(found, key=lambda edge: edge.time)


def snap(
    moments: Sequence[Moment],
    edges: Sequence[Edge],
    within_s: float,
    *,
    shortest: float = 0.0,
    longest: float = math.inf,
    duration: float = math.inf,
) -> list[Moment]:
    """The moments with their ends moved to edges no further than `within_s`: to the nearest cut, or the nearest pause.

    Moments come best first, and a worse one makes room for a better one, so that fewer moments are a prefix of more:
    one that is left too short by that is dropped. A moment that would become too short by moving one end gets what it
    lacks at the other; an end stays where there is no room for that, or where the moment would become too long.
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
        at_edge = False  # the start, which the end then leaves where it is
        for bound in (moment.start, moment.end):
            is_start = bound == moment.start
            near = [edge for edge in edges if abs(edge.time - bound) <= within_s and low <= edge.time <= high]
            for edge in sorted(near, key=lambda edge: (edge.kind != "shot", abs(edge.time - bound), edge.time)):
                ends = (edge.time, end) if is_start else (start, edge.time)
                moved = room.fitted(*ends, keep_start=is_start)
                if moved is not None and (is_start or not at_edge or moved[0] == start):
                    start, end = moved
                    at_edge = is_start
                    break
        placed.append(replace(moment, start=start, end=end))
    return placed


@dataclass(frozen=True)
class _Room:
    """Where a moment may lie, and how long it may be."""

    low: float
    high: float
    least: float
    most: float

    def fitted(self, start: float, end: float, *, keep_start: bool) -> tuple[float, float] | None:
        """The ends, inside the room; what is missing to the least length is added at the end that is not kept."""
        start, end = max(start, self.low), min(end, self.high)
        lacking = self.least - (end - start)
        if lacking > self.least / 2:  # it would be another moment
            return None
        if lacking > 1e-9:
            start, end = (start, end + lacking) if keep_start else (start - lacking, end)
        inside = self.low - 1e-9 <= start < end <= self.high + 1e-9
        return (start, end) if inside and end - start <= self.most + 1e-9 else None


def _look(frame: NDArray[np.uint8]) -> NDArray[np.float64]:
    """What a picture looks like, so that moving things in it change little: its colours, and where it is bright."""
    pixels = frame.reshape(-1, 3)
    bins = pixels // (256 // _BINS)
    colours = [np.bincount(bins[:, channel], minlength=_BINS) / len(bins) for channel in range(3)]
    luma = frame.mean(axis=2)
    rows = [part for row in np.array_split(luma, _BLOCKS) for part in np.array_split(row, _BLOCKS, axis=1)]
    # Both halves of the difference between two looks lie in 0..1.
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
