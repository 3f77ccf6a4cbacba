"""Cutting a moment out of a video: as it is, from a key frame on, or encoded anew with exact ends.

Copying is instant and loses nothing, but a picture can only be entered at a key frame: the cut begins at the last one
before the moment, and says so. Encoding anew (H.264 and AAC, in MP4) begins and ends where it should.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unisono.errors import ConfigError
from unisono.recipes.clips.copying import copy
from unisono.recipes.clips.crop import Crop
from unisono.recipes.clips.encoding import encode
from unisono.recipes.clips.footage import Footage
from unisono.recipes.clips.moments import Moment
from unisono.recipes.clips.mp4 import new_file


@dataclass(frozen=True)
class Cut:
    """A file that was cut, and what it shows, in seconds of the video: a copy may begin earlier than the moment."""

    path: Path
    start: float
    end: float


def cut(video: Path | Footage, moment: Moment, to: Path, *, exact: bool = False, crop: Crop | None = None) -> Cut:
    """Writes a moment of a video to a new MP4 file, never over another one; a crop is always encoded anew."""
    footage = video if isinstance(video, Footage) else Footage(video)
    if not 0 <= moment.start < moment.end or moment.start >= footage.duration:
        raise ConfigError(
            f"{footage.path} has {footage.duration:.2f} s; {moment.start:.2f} to {moment.end:.2f} s is no part of it"
        )
    with new_file(to) as partial:
        start, end = encode(footage, moment, partial, crop) if exact or crop else copy(footage, moment, partial)
    return Cut(to, start, end)
