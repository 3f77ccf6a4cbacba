"""Cuts a moment out of a video, by copying its streams or by re-encoding it.

A stream copy is instant and lossless, but it can only start at a key frame: the last key frame before the moment. A
re-encoded clip (H.264 and AAC in MP4) starts and ends at the exact frame.
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
    """A new file and the part of the video that it contains; a stream copy may start before the moment."""

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
    """Writes a moment of a video to a new MP4 file; never overwrites a file.

    If `exact`, `crop` or `height` (in pixels; the aspect ratio is preserved) is set, the video is re-encoded.
    """
    footage = video if isinstance(video, Footage) else Footage(video)
    if not 0 <= moment.start < moment.end or moment.start >= footage.duration:
        raise ConfigError(
            f"{footage.path} is {footage.duration:.2f} s long; {moment.start:.2f} to {moment.end:.2f} s is not in it"
        )
    with new_file(to) as partial:
        if exact or crop or height:
            start, end = encode(footage, moment, partial, crop, height)
        else:
            start, end = copy(footage, moment, partial)
    return Cut(to, start, end)
