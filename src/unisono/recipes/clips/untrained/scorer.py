"""Scores a whole video without a trained run, clip by clip; the result depends only on the file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UserError
from unisono.recipes.clips.scoring import Scored
from unisono.recipes.clips.trained import VideoScorer
from unisono.recipes.clips.untrained import faces
from unisono.recipes.clips.untrained.combine import contributions
from unisono.recipes.clips.untrained.picture import Pictures
from unisono.recipes.clips.untrained.sound import SAMPLE_RATE, measure
from unisono.recipes.clips.video.clips import clips
from unisono.recipes.common.bad_files import BadMedia

NAME = "the built-in scorer"
NOTE = (
    "scored by the built-in scorer, which measures sound, motion and faces and knows nothing about your viewers; to "
    "replace it, train on labelled videos and pass --run"
)
_CLIP_SECONDS = 2.0
_FRAMES_PER_CLIP = 8
_RHYTHM_CLIPS = 5  # scene cuts are counted over this number of clips, centred on each clip
_BEFORE_CLIPS = 10  # loudness is compared with this number of previous clips

Floats = NDArray[np.float64]


def untrained_scorer() -> VideoScorer:
    """Returns the scorer that needs no run."""
    return VideoScorer(score, NAME)


def score(video: Path, progress: Callable[[float], None] = lambda seconds: None) -> Scored:
    """Scores a video of any length; memory grows by a few bytes per clip."""
    with_faces = faces.available()
    pictures, measured = Pictures(), _Measured()
    try:
        reading = clips(video, _CLIP_SECONDS, _FRAMES_PER_CLIP, faces.SIZE, SAMPLE_RATE)
        with closing(reading):
            for frames, sound in reading:
                of_picture = pictures.measure(_smaller(frames))
                measured.add(motion=of_picture.motion, cuts=of_picture.num_cuts, screen=of_picture.screen)
                of_sound = measure(sound)
                measured.add(speech=of_sound.speech, laughter=of_sound.laughter, decibel=of_sound.decibel)
                if with_faces:
                    measured.add(faces=faces.presence(frames[len(frames) // 2]))
                progress(reading.duration)
    except BadMedia as error:
        raise UserError(str(error)) from None
    parts = contributions(measured.parts(has_sound=reading.has_sound))
    scores = np.sum(list(parts.values()), axis=0)
    return Scored(scores, _CLIP_SECONDS, reading.duration, reading.has_sound, reading.damage, parts)


class _Measured:
    """The measurements of all clips so far, by name."""

    def __init__(self) -> None:
        self._columns: dict[str, list[float]] = {}

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self._columns.setdefault(name, []).append(value)

    def parts(self, *, has_sound: bool) -> dict[str, Floats]:
        """Returns the measurements to compare within the video, keyed by the names of their parts."""
        columns = {name: np.array(values) for name, values in self._columns.items()}
        rhythm = np.convolve(columns.pop("cuts"), np.ones(_RHYTHM_CLIPS), mode="same")
        of_sound = {name: columns.pop(name) for name in ("speech", "laughter")}
        of_sound["loudness"] = _rise(columns.pop("decibel"))
        return columns | {"scenes": rhythm[: len(columns["motion"])]} | (of_sound if has_sound else {})


def _rise(decibel: Floats) -> Floats:
    """Returns how much louder each clip is than the median of the previous clips."""
    before = [np.median(decibel[max(0, at - _BEFORE_CLIPS) : at]) if at else decibel[0] for at in range(len(decibel))]
    return np.asarray(decibel - np.array(before))


def _smaller(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Averages blocks of 3×3 pixels, because measuring motion needs less resolution than finding faces."""
    height, width = (side // 3 * 3 for side in frames.shape[1:3])
    blocks = frames[:, :height, :width].reshape(len(frames), height // 3, 3, width // 3, 3, 3)
    return np.asarray(blocks.mean(axis=(2, 4)), dtype=np.uint8)
