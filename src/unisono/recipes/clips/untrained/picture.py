"""Measures motion, scene cuts and changes of the screen's content, clip by clip."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.clips.cutting.edges import shots

_LUMA = np.array([0.299, 0.587, 0.114])
_CHANGED = 0.08  # minimum brightness difference of a changed pixel (black is 0, white is 1)
_STILL = 0.02  # mean frame difference at which a scene no longer counts as still
_BEFORE = 4  # number of frames of the previous clip to compare with this clip's frames


@dataclass(frozen=True)
class PictureOfClip:
    """The measurements of a clip's frames."""

    motion: float
    """Median difference between successive frames, from 0 to 1; excludes scene cuts."""
    num_cuts: int
    screen: float
    """Fraction of the screen that changed since the last clip in an otherwise still scene, such as for a new slide."""


class Pictures:
    """Measures the clips of a video in order, comparing each clip with the previous clip."""

    def __init__(self) -> None:
        self._last: NDArray[np.uint8] | None = None  # the last frames of the previous clip
        self._look: NDArray[np.float64] | None = None  # brightness of the previous clip, averaged over time

    def measure(self, frames: NDArray[np.uint8]) -> PictureOfClip:
        """Measures the next clip [frames, height, width, 3]."""
        joined = frames if self._last is None else np.concatenate([self._last, frames])
        luma = joined @ _LUMA / 255
        differences = np.abs(np.diff(luma, axis=0)).mean(axis=(1, 2)) if len(luma) > 1 else np.zeros(1)
        # A cut between this clip's last frame and the next clip is found when the next clip is measured.
        first_new = len(joined) - len(frames)
        cuts = [edge for edge in shots(joined, np.arange(len(joined), dtype=np.float64)) if edge.time >= first_new]
        look = np.median(luma[first_new:], axis=0)
        motion = float(np.median(differences[max(0, first_new - 1) :])) if len(differences) else 0.0
        changed = 0.0 if self._look is None else float((np.abs(look - self._look) > _CHANGED).mean())
        self._last, self._look = frames[-_BEFORE:].copy(), look
        return PictureOfClip(motion, len(cuts), changed * math.exp(-motion / _STILL))
