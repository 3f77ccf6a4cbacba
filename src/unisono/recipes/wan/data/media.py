"""Pictures and films as tensors: what a file holds, what a sample is cut to, and its frames.

A video model takes 4k + 1 frames (the first stands alone, then four become one latent frame) of sizes that its patches
divide. `probe` says what is there, `fit` what of it is used, `read` gives exactly that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from unisono.errors import ConfigError
from unisono.recipes.common.bad_files import BadMedia
from unisono.recipes.common.streams import FILMS
from unisono.recipes.wan.data.decode import PICTURES, Film, MediaFacts, Shown, StillOrAnimation, opened
from unisono.recipes.wan.data.show import grid, write_film

__all__ = [
    "FILMS",
    "PICTURES",
    "STARTS",
    "BadMedia",
    "Fit",
    "MediaFacts",
    "fit",
    "frames_at",
    "from_unit",
    "grid",
    "probe",
    "read",
    "to_unit",
    "window",
    "write_film",
]

STARTS = ("head", "middle", "random")  # where in a film that is longer than the window the window begins


def probe(path: Path) -> MediaFacts:
    """What a file shows, as displayed: turned upright, with square pixels.

    Reads the header and one frame; where the header does not know the length, the frames are counted.
    """
    return opened(path).facts


def window(frames: int, wanted: int) -> int:
    """The longest window of 4k + 1 frames that is not longer than what there is and what is wanted; at least 1."""
    return max(0, min(frames, wanted) - 1) // 4 * 4 + 1


def frames_at(facts: MediaFacts, fps: float) -> int:
    """How many frames a film has when it is shown with `fps` frames per second; 0 leaves its own rate."""
    if not facts.fps or not fps:
        return facts.frames
    return max(1, math.floor(facts.frames * fps / facts.fps + 0.5))


@dataclass(frozen=True)
class Fit:
    """What a sample is cut to."""

    frames: int
    height: int
    width: int


def fit(
    facts: MediaFacts, *, num_frames: int, height: int, width: int, max_pixels: int, multiple: int, fps: float
) -> Fit:
    """What a sample with these facts is cut to: `num_frames` or the longest window it has, and a size the model takes.

    With a height and a width every sample gets exactly these. With 0 and 0 it keeps its own proportions: as large as it
    is and `max_pixels` allows (0: any size), rounded down to multiples of `multiple`.
    """
    if num_frames < 1:
        raise ConfigError(f"num_frames: expected at least 1, got {num_frames}")
    if not 0 <= fps < math.inf:
        raise ConfigError(f"fps: expected 0 (as the film is) or more, got {fps}")
    frames = window(frames_at(facts, fps), num_frames)
    if height or width:
        _check_size(height, width, multiple)
        return Fit(frames, height, width)
    if max_pixels and max_pixels < multiple**2:
        raise ConfigError(f"max_pixels {max_pixels}: the smallest picture has {multiple}×{multiple} = {multiple**2}")
    most = max_pixels or facts.height * facts.width
    scale = min(1.0, math.sqrt(most / (facts.height * facts.width)))
    # A billionth more than exact: 0.1 × 160 must not fall below 16.
    high, wide = (math.floor(side * scale * (1 + 1e-9) / multiple) * multiple for side in (facts.height, facts.width))
    if max_pixels:  # a strip narrower than one multiple grows to it, and must not be too long then
        longest = max_pixels // multiple // multiple * multiple
        high, wide = min(high, longest), min(wide, longest)
    return Fit(frames, max(high, multiple), max(wide, multiple))


def _check_size(height: int, width: int, multiple: int) -> None:
    for name, side in (("height", height), ("width", width)):
        if side < 1:
            raise ConfigError(
                f"height {height}, width {width}: give both, or neither to keep each sample's proportions"
            )
        if side % multiple:
            below = side // multiple * multiple
            near = " or ".join(str(size) for size in (below, below + multiple) if size)
            raise ConfigError(f"{name} {side} is not a multiple of {multiple}, as this model needs; use {near}")


def read(path: Path, fit: Fit, *, fps: float, start: str = "head") -> Tensor:
    """uint8 [F, H, W, 3] the frames of a sample: resized until they cover the size, the middle cut out.

    With `fps` a film is resampled by the times of its frames. A film longer than the window is read from its `start`:
    "head", "middle", or "random", drawn from torch's global generator. Only what is needed is decoded.
    """
    if start not in STARTS:
        raise ConfigError(f"start of the window: expected one of {', '.join(STARTS)}, got {start!r}")
    medium = opened(path)
    spare = frames_at(medium.facts, fps) - fit.frames
    if spare < 0:
        raise BadMedia(path, f"has {spare + fit.frames} frames, {fit.frames} were expected; it is not what it was")
    first = 0
    if start == "middle":
        first = spare // 2
    elif start == "random":
        first = int(torch.randint(spare + 1, ()))
    frames = torch.empty((fit.frames, fit.height, fit.width, 3), dtype=torch.uint8)
    number, before = 0, None
    for shown in _chosen(medium, first, fit.frames, fps if medium.facts.fps else 0.0):
        if shown is before:  # at more frames per second than the film has, a frame is shown more than once
            frames[number] = frames[number - 1]
        else:
            frames[number] = _cover(medium.picture(shown), fit, medium.pixel_aspect)
        number, before = number + 1, shown
    if number < fit.frames:
        raise BadMedia(path, f"ends after {number} of the {fit.frames} frames from frame {first}; it is damaged")
    return frames


def _chosen(medium: Film | StillOrAnimation, first: int, count: int, fps: float) -> Iterator[Shown]:
    if fps:
        times = [(first + number) / fps for number in range(count)]
        return _shown_at(times, medium.frames(times[0]), 1 / medium.facts.fps)
    if not first:
        return islice(medium.frames(0), count)
    return _in_order(medium, first, count)


def _in_order(medium: Film | StillOrAnimation, first: int, count: int) -> Iterator[Shown]:
    """`count` frames as they come, from the one at the time that number `first` would have at an even pace."""
    begin = (first - 0.5) / medium.facts.fps
    found = list(islice((shown for shown in medium.frames(begin) if shown.time >= begin), count))
    if len(found) == count:
        return iter(found)
    return islice(medium.frames(0), first, first + count)  # an uneven pace, and too few left: by counting then


def _shown_at(times: list[float], frames: Iterator[Shown], period: float) -> Iterator[Shown]:
    """For each time the frame that is shown then; the last frame lasts as long as one usually does."""
    # Times in files are rounded, and those of phones tremble: a frame may come a little early. Not half a period, which
    # would make every other frame of a film at twice its rate a matter of rounding.
    early = 0.3 * period
    wanted = iter(times)
    time = next(wanted)
    last: Shown | None = None
    for shown in frames:
        while last is not None and time + early < shown.time:
            yield last
            following = next(wanted, None)
            if following is None:
                return
            time = following
        last = shown
    while last is not None and time < last.time + max(1.5 * period, 0.25):
        yield last
        following = next(wanted, None)
        if following is None:
            return
        time = following


def _cover(picture: NDArray[np.uint8], fit: Fit, pixel_aspect: float) -> Tensor:
    """uint8 [H, W, 3] the middle of the picture, as large as the proportions of the size allow, in that size."""
    height, width = picture.shape[:2]
    scale = max(fit.height / height, fit.width / (width * pixel_aspect))
    high = min(height, max(1, round(fit.height / scale)))
    wide = min(width, max(1, round(fit.width / scale / pixel_aspect)))
    top, left = (height - high) // 2, (width - wide) // 2
    middle = torch.from_numpy(picture)[top : top + high, left : left + wide]
    if (high, wide) == (fit.height, fit.width):
        return middle
    channels_first = middle.permute(2, 0, 1)[None]
    # antialias: the filter widens as it shrinks. The same numbers as Pillow's, in a third of the time.
    small = functional.interpolate(channels_first, (fit.height, fit.width), mode="bicubic", antialias=True)
    return small[0].permute(1, 2, 0)


def to_unit(frames: Tensor) -> Tensor:
    """Frames uint8 [F, H, W, 3] as the models take them: float32 [3, F, H, W] in [-1, 1]."""
    return frames.permute(3, 0, 1, 2).to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1)


def from_unit(frames: Tensor) -> Tensor:
    """Frames float [3, F, H, W] in [-1, 1] as uint8 [F, H, W, 3] to look at."""
    return frames.permute(1, 2, 3, 0).float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8).contiguous()
