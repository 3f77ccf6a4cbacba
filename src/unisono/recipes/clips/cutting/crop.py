"""A narrow picture out of a wide one: a window of fixed size that follows what moves, without haste."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unisono.errors import ConfigError
from unisono.recipes.clips.cutting.edges import shots
from unisono.recipes.clips.cutting.moments import Moment
from unisono.recipes.clips.video.footage import Footage

_RATE = 8.0  # pictures per second that are looked at
_SIDE = 64  # pixels of their longer side
_PLACES = 33  # where the window may stand, from one end to the other
_HASTE = 0.1  # what moving costs, against following: about a second for half the picture
_CENTRE = 0.03  # how much the middle is preferred where nothing moves
_STILL = 0.001  # mean change of a picture, of full scale, below which what moves is mostly noise
_LATER = 2  # pictures
_SMOOTH = 0.35  # seconds


@dataclass(frozen=True)
class Crop:
    """A window of some shape (width by height), and where its middle is when: 0 to 1 along the side that is cut."""

    aspect: float
    times: NDArray[np.float64]
    centres: NDArray[np.float64]

    def size(self, height: int, width: int, pixel_aspect: float = 1.0) -> tuple[int, int]:
        """Height and width of the window in an upright picture: as large as fits, and even, as H.264 wants it."""
        shape = self.aspect / pixel_aspect  # in pixels
        if width > height * shape:
            width = round(height * shape)
        else:
            height = round(width / shape)
        return max(2, height // 2 * 2), max(2, width // 2 * 2)

    def corner(self, time: float, height: int, width: int, pixel_aspect: float = 1.0) -> tuple[int, int]:
        """Top and left of the window at a time; even, so that colours stay where they are."""
        high, wide = self.size(height, width, pixel_aspect)
        centre = float(np.interp(time, self.times, self.centres)) if len(self.times) else 0.5
        top, left = ((centre * full - part / 2) for full, part in ((height, high), (width, wide)))
        # Only one side is cut for its shape; the other loses an odd line at most.
        return (_even(top, height - high), _even(left, width - wide))


def parse_aspect(text: str) -> float:
    """9:16 as a number; ConfigError for anything else than two sides."""
    match = re.fullmatch(r"(\d{1,4})[:x/](\d{1,4})", text.strip())
    sides = [int(side) for side in match.groups()] if match else []
    if not sides or not all(sides) or not 0.1 <= sides[0] / sides[1] <= 10:
        raise ConfigError(f"--crop {text}: expected width:height, like 9:16")
    return sides[0] / sides[1]


def follow(video: Path | Footage, moment: Moment, aspect: float) -> Crop:
    """The window of that shape which follows what moves in a moment of a video."""
    footage = video if isinstance(video, Footage) else Footage(video)
    shown_width = footage.width * footage.pixel_aspect
    scale = _SIDE / max(shown_width, footage.height)
    size = (max(8, round(shown_width * scale)), max(8, round(footage.height * scale)))
    seen: list[tuple[float, NDArray[np.uint8]]] = []
    for time, frame in footage.frames(moment.start, moment.end):
        if not seen or time - seen[-1][0] >= 1 / _RATE - 0.5 / footage.fps:
            seen.append((max(time, moment.start), footage.picture(frame, size)))
    times = np.array([time for time, _ in seen])
    if not seen:
        return Crop(aspect, times, times)
    frames = np.stack([picture for _, picture in seen])
    across = shown_width > footage.height * aspect
    share = footage.height * aspect / shown_width if across else shown_width / aspect / footage.height
    cuts = [edge.time for edge in shots(frames, times)]
    return Crop(aspect, *path(frames if across else frames.transpose(0, 2, 1, 3), times, share, cuts))


def path(
    frames: NDArray[np.uint8], times: NDArray[np.float64], share: float, cuts: Sequence[float] = ()
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Times, and where the middle of a window of `share` of the width is, from small pictures [N, height, width, 3].

    Each shot has a path of its own, the one that sees most of the motion for the least movement. The window jumps only
    where the shot changes.
    """
    places = np.linspace(share / 2, 1 - share / 2, _PLACES)
    bounds = [0, *(int(np.searchsorted(times, cut)) for cut in cuts), len(times)]
    found_times: list[NDArray[np.float64]] = []
    found: list[NDArray[np.float64]] = []
    for first, last in pairwise(bounds):
        if last <= first:
            continue
        part, shot = times[first:last], frames[first:last]
        centres = _smooth(_cheapest(_seen(shot, places, share), places, part), part)
        if found_times:  # until the change of shot the window stays: between two pictures it would be seen to slide
            found_times.append(np.array([part[0] - 1e-6]))
            found.append(found[-1][-1:])
        found_times.append(part)
        found.append(centres)
    return np.concatenate(found_times), np.concatenate(found)


def _seen(frames: NDArray[np.uint8], places: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """How much of the motion [N, places] the window would see; where there is little, the middle is preferred."""
    luma = frames.mean(axis=3) / 255
    # Over a quarter of a second, and back at the beginning: what moves slowly has moved by then.
    change = np.abs(luma - np.concatenate([luma[_LATER : 2 * _LATER], luma[:-_LATER]])[: len(luma)])
    # What moves everywhere is the camera.
    change = np.maximum(change - np.median(change, axis=(1, 2), keepdims=True), 0)
    columns = change.mean(axis=1)
    width = columns.shape[1]
    away = np.abs((np.arange(width)[:, None] + 0.5) / width - places) / (share / 2)
    # A parabola, so that the window has in its middle what it sees, and not just somewhere.
    weights = np.maximum(1 - away**2, 0)
    inside = columns @ weights / (columns.sum(axis=1, keepdims=True) + _STILL * width)
    return np.asarray(inside + _CENTRE * (1 - np.abs(places - 0.5) * 2))


def _cheapest(
    seen: NDArray[np.float64], places: NDArray[np.float64], times: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The path through the places that sees most and moves least, over all paths there are (Viterbi)."""
    steps = np.diff(times, prepend=times[0] - 1 / _RATE).clip(1e-3)
    squared = (places[:, None] - places[None]) ** 2  # [from, to]
    best, came_from = seen[0] * steps[0], []
    for number in range(1, len(seen)):
        # Squared speed, for as long as it lasts: a slow pan is cheaper than a quick one over the same way.
        options = best[:, None] - _HASTE * squared / steps[number]
        came_from.append(options.argmax(axis=0))
        best = options.max(axis=0) + seen[number] * steps[number]
    at = [int(best.argmax())]
    for origin in reversed(came_from):
        at.append(int(origin[at[-1]]))
    return places[at[::-1]]


def _smooth(centres: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(-0.5 * ((times[:, None] - times[None]) / _SMOOTH) ** 2)
    return np.asarray(weights @ centres / weights.sum(axis=1))


def _even(place: float, most: int) -> int:
    return int(min(max(place, 0), most)) // 2 * 2
