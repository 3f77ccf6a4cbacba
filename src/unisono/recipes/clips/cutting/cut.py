"""Cutting a moment out of a video: as it is, from a key frame on, or encoded anew with exact ends.

Copying is instant and loses nothing, but a picture can only be entered at a key frame: the cut begins at the last one
before the moment, and says so. Encoding anew (H.264 and AAC, in MP4) begins and ends where it should.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unisono.errors import ConfigError
from unisono.recipes.clips.cutting.copying import copy
from unisono.recipes.clips.cutting.crop import Crop
from unisono.recipes.clips.cutting.encoding import encode
from unisono.recipes.clips.cutting.moments import Moment
from unisono.recipes.clips.cutting.mp4 import new_file
from unisono.recipes.clips.video.footage import Footage


@dataclass(frozen=True)
class Cut:
    """A file that was cut, and what it shows, in seconds of the video: a copy may begin earlier than the moment."""

    path: Path
    start: float
    end: float


def cut(
    video: Path | Footage,
    moment: Moment,
    to: Path,
    *,
    exact: bool = False,
    crop: Crop | None = None,
    height: int | None = None,
) -> Cut:
    """Writes a moment of a video to a new MP4 file, never over another one; a crop is always encoded anew.

    `height` in pixels scales what is encoded, and the width with it.
    """
    footage = video if isinstance(video, Footage) else Footage(video)
    if not 0 <= moment.start < moment.end or moment.start >= footage.duration:
        raise ConfigError(
            f"{footage.path} has {footage.duration:.2f} s; {moment.start:.2f} to {moment.end:.2f} s is no part of it"
        )
    with new_file(to) as partial:
        if exact or crop or height:
            start, end = encode(footage, moment, partial, crop, height)
        else:
            start, end = copy(footage, moment, partial)
    return Cut(to, start, end)
