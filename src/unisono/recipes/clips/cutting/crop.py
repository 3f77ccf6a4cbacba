"""Crops a video to another aspect ratio with a window of fixed size that smoothly follows the motion."""

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

_RATE = 8.0  # number of frames to analyse per second
_LONGER_SIDE = 64  # width or height of the analysed frames, in pixels
_NUM_POSITIONS = 33  # number of window positions to consider
_SPEED_COST = 0.1  # cost of moving the window; at 0.1, the window takes about a second to cross half a frame
_CENTRE_BONUS = 0.03  # reward for the centre, so the window stays there if nothing moves
_NOISE = 0.001  # mean difference between frames (full scale is 1) below which it is mostly noise
_FRAMES_APART = 2  # motion is the difference between frames that are this many frames apart
_SMOOTH_S = 0.35  # standard deviation of the smoothing, in seconds


@dataclass(frozen=True)
class Crop:
    """A window of fixed aspect ratio (width / height), and its position over time."""

    aspect: float
    times: NDArray[np.float64]
    centres: NDArray[np.float64]
    """Position of the window's centre at `times`: 0 to 1 along the side that is cropped."""

    def size(self, height: int, width: int, pixel_aspect: float = 1.0) -> tuple[int, int]:
        """Returns the window's height and width in pixels of an upright frame: the largest even numbers that fit."""
        shape = self.aspect / pixel_aspect  # aspect ratio of the window in pixels of the video
        if width > height * shape:
            width = round(height * shape)
        else:
            height = round(width / shape)
        return max(2, height // 2 * 2), max(2, width // 2 * 2)

    def corner(self, time: float, height: int, width: int, pixel_aspect: float = 1.0) -> tuple[int, int]:
        """Returns the window's top and left edges at a time, in pixels; even numbers, as chroma planes require."""
        high, wide = self.size(height, width, pixel_aspect)
        centre = float(np.interp(time, self.times, self.centres)) if len(self.times) else 0.5
        top, left = ((centre * full - part / 2) for full, part in ((height, high), (width, wide)))
        # Along the side that is not cropped, at most one line is cut off (to get an even size), so the position is 0.
        return (_even(top, height - high), _even(left, width - wide))


def parse_aspect(text: str) -> float:
    """Parses an aspect ratio such as 9:16; raises ConfigError if it is invalid."""
    match = re.fullmatch(r"(\d{1,4})[:x/](\d{1,4})", text.strip())
    sides = [int(side) for side in match.groups()] if match else []
    if not sides or not all(sides) or not 0.1 <= sides[0] / sides[1] <= 10:
        raise ConfigError(f"--crop {text}: expected width:height, like 9:16")
    return sides[0] / sides[1]


def follow(video: Path | Footage, moment: Moment, aspect: float) -> Crop:
    """Returns the crop that follows the motion in a moment of a video."""
    footage = video if isinstance(video, Footage) else Footage(video)
    shown_width = footage.width * footage.pixel_aspect
    scale = _LONGER_SIDE / max(shown_width, footage.height)
    size = (max(8, round(shown_width * scale)), max(8, round(footage.height * scale)))
    sampled: list[tuple[float, NDArray[np.uint8]]] = []
    for time, frame in footage.frames(moment.start, moment.end):
        if not sampled or time - sampled[-1][0] >= 1 / _RATE - 0.5 / footage.fps:
            sampled.append((max(time, moment.start), footage.picture(frame, size)))
    times = np.array([time for time, _ in sampled])
    if not sampled:
        return Crop(aspect, times, times)
    frames = np.stack([picture for _, picture in sampled])
    is_horizontal = shown_width > footage.height * aspect
    share = footage.height * aspect / shown_width if is_horizontal else shown_width / aspect / footage.height
    cuts = [edge.time for edge in shots(frames, times)]
    return Crop(aspect, *path(frames if is_horizontal else frames.transpose(0, 2, 1, 3), times, share, cuts))


def path(
    frames: NDArray[np.uint8], times: NDArray[np.float64], share: float, cuts: Sequence[float] = ()
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns times, and the position of the window's centre at each time; the window covers `share` of the width.

    `frames` [N, height, width, 3] are small frames. In each shot the window covers as much motion as possible while it
    moves slowly; it jumps only between shots.
    """
    positions = np.linspace(share / 2, 1 - share / 2, _NUM_POSITIONS)
    bounds = [0, *(int(np.searchsorted(times, cut)) for cut in cuts), len(times)]
    path_times: list[NDArray[np.float64]] = []
    path_centres: list[NDArray[np.float64]] = []
    for first, last in pairwise(bounds):
        if last <= first:
            continue
        shot_times, shot = times[first:last], frames[first:last]
        centres = _smooth(_best_path(_motion_inside(shot, positions, share), positions, shot_times), shot_times)
        if path_times:  # holds the position until the scene cut; interpolation would move the window too early
            path_times.append(np.array([shot_times[0] - 1e-6]))
            path_centres.append(path_centres[-1][-1:])
        path_times.append(shot_times)
        path_centres.append(centres)
    return np.concatenate(path_times), np.concatenate(path_centres)


def _motion_inside(frames: NDArray[np.uint8], positions: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Returns, for each frame and window position, the fraction of the motion in the window plus a centre bonus."""
    luma = frames.mean(axis=3) / 255
    # Compares frames a quarter of a second apart, so that slow motion is visible. The first frames are compared with
    # later frames, because there are no earlier ones.
    compared = np.concatenate([luma[_FRAMES_APART : 2 * _FRAMES_APART], luma[:-_FRAMES_APART]])[: len(luma)]
    change = np.abs(luma - compared)
    # Subtracts camera motion, which changes the whole frame.
    change = np.maximum(change - np.median(change, axis=(1, 2), keepdims=True), 0)
    columns = change.mean(axis=1)
    width = columns.shape[1]
    distance = np.abs((np.arange(width)[:, None] + 0.5) / width - positions) / (share / 2)
    # Uses weights that form a parabola, so that motion in the centre of the window counts most.
    weights = np.maximum(1 - distance**2, 0)
    inside = columns @ weights / (columns.sum(axis=1, keepdims=True) + _NOISE * width)
    return np.asarray(inside + _CENTRE_BONUS * (1 - np.abs(positions - 0.5) * 2))


def _best_path(
    rewards: NDArray[np.float64], positions: NDArray[np.float64], times: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns the path with the highest sum of rewards [N, positions] minus costs of movement (Viterbi algorithm)."""
    steps = np.diff(times, prepend=times[0] - 1 / _RATE).clip(1e-3)
    squared = (positions[:, None] - positions[None]) ** 2  # [from, to]
    best, previous = rewards[0] * steps[0], []
    for number in range(1, len(rewards)):
        # The cost is the squared speed times the duration: a slow pan costs less than a fast pan of the same distance.
        options = best[:, None] - _SPEED_COST * squared / steps[number]
        previous.append(options.argmax(axis=0))
        best = options.max(axis=0) + rewards[number] * steps[number]
    indices = [int(best.argmax())]
    for origins in reversed(previous):
        indices.append(int(origins[indices[-1]]))
    return positions[indices[::-1]]


def _smooth(centres: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(-0.5 * ((times[:, None] - times[None]) / _SMOOTH_S) ** 2)
    return np.asarray(weights @ centres / weights.sum(axis=1))


def _even(position: float, most: int) -> int:
    return int(min(max(position, 0), most)) // 2 * 2
