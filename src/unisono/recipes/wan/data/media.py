"""Reads images and videos as tensors: probes a file, fits a sample to the model's sizes, and decodes its frames.

A Wan model takes 4k + 1 frames, because its VAE maps the first frame to one latent frame, and each further group of
four frames to another. Height and width must be divisible by the model's patch size in pixels. `probe` reads the frame
count and size of a file, `fit` chooses the frame count and size of its sample, and `read` decodes that sample.
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
from unisono.recipes.wan.checks import check_size
from unisono.recipes.wan.data.decode import ImageOrAnimation, MediaFacts, TimedFrame, Video, opened

STARTS = ("head", "middle", "random")  # positions of the window in a longer video


def probe(path: Path) -> MediaFacts:
    """Returns a file's frame count and frame rate, and its size as displayed: upright, with square pixels.

    Reads the header and one frame. If the header does not contain the number of frames, counts them.
    """
    return opened(path).facts


def window(frames: int, requested: int) -> int:
    """Returns the largest number of the form 4k + 1 that is at most `frames` and at most `requested`; at least 1."""
    return max(0, min(frames, requested) - 1) // 4 * 4 + 1


def frames_at(facts: MediaFacts, fps: float) -> int:
    """Returns the frame count of a video resampled to `fps` frames per second; 0 keeps its own rate."""
    if not facts.fps or not fps:
        return facts.frames
    return max(1, math.floor(facts.frames * fps / facts.fps + 0.5))


@dataclass(frozen=True)
class Fit:
    """The frame count and size of a sample."""

    frames: int
    height: int
    width: int


def fit(
    facts: MediaFacts, *, num_frames: int, height: int, width: int, max_pixels: int, multiple: int, fps: float
) -> Fit:
    """Chooses the frame count (at most `num_frames`) of a file's sample, and a size that the model accepts.

    With a height and a width, every sample has that size. If both are 0, a sample keeps its aspect ratio; its size is
    scaled down to at most `max_pixels` (0: no limit) and rounded down to multiples of `multiple`.
    """
    if num_frames < 1:
        raise ConfigError(f"num_frames: expected at least 1, got {num_frames}")
    if not 0 <= fps < math.inf:
        raise ConfigError(f"fps: expected 0 (the video's own) or more, got {fps}")
    frames = window(frames_at(facts, fps), num_frames)
    if height or width:
        check_size(height, width, multiple)
        return Fit(frames, height, width)
    if max_pixels and max_pixels < multiple**2:
        raise ConfigError(f"max_pixels {max_pixels}: expected at least {multiple}×{multiple} = {multiple**2}")
    most = max_pixels or facts.height * facts.width
    scale = min(1.0, math.sqrt(most / (facts.height * facts.width)))
    # Adds a billionth so that rounding errors do not turn 0.1 × 160 into less than 16.
    high, wide = (math.floor(side * scale * (1 + 1e-9) / multiple) * multiple for side in (facts.height, facts.width))
    if max_pixels:  # a side below `multiple` is enlarged to `multiple`, so the other side needs a limit
        longest = max_pixels // multiple // multiple * multiple
        high, wide = min(high, longest), min(wide, longest)
    return Fit(frames, max(high, multiple), max(wide, multiple))


def read(path: Path, fit: Fit, *, fps: float, start: str = "head") -> Tensor:
    """Reads the frames of a sample, uint8 [F, H, W, 3], resized to cover the size of `fit` and centre-cropped.

    With `fps`, resamples a video by its frames' timestamps. `start` is the position of the window in a longer video:
    "head", "middle", or "random" (from torch's global generator). Decodes only the frames that the sample needs.
    """
    if start not in STARTS:
        raise ConfigError(f"window: expected one of {', '.join(STARTS)}, got {start!r}")
    media = opened(path)
    spare = frames_at(media.facts, fps) - fit.frames
    if spare < 0:
        raise BadMedia(path, f"has {spare + fit.frames} frames, {fit.frames} were expected; the file has changed")
    first = 0
    if start == "middle":
        first = spare // 2
    elif start == "random":
        first = int(torch.randint(spare + 1, ()))
    frames = torch.empty((fit.frames, fit.height, fit.width, 3), dtype=torch.uint8)
    number, before = 0, None
    for frame in _chosen(media, first, fit.frames, fps if media.facts.fps else 0.0):
        if frame is before:  # frames repeat if `fps` is higher than the video's frame rate
            frames[number] = frames[number - 1]
        else:
            frames[number] = _cover(media.rgb(frame), fit, media.pixel_aspect)
        number, before = number + 1, frame
    if number < fit.frames:
        raise BadMedia(path, f"ends after {number} of the {fit.frames} frames from frame {first}; the file is damaged")
    return frames


def _chosen(media: Video | ImageOrAnimation, first: int, count: int, fps: float) -> Iterator[TimedFrame]:
    if fps:
        times = [(first + number) / fps for number in range(count)]
        return _shown_at(times, media.frames(times[0]), 1 / media.facts.fps)
    if not first:
        return islice(media.frames(0), count)
    return _in_order(media, first, count)


def _in_order(media: Video | ImageOrAnimation, first: int, count: int) -> Iterator[TimedFrame]:
    """Yields `count` consecutive frames, starting at the time that frame `first` has at a constant frame rate."""
    begin = (first - 0.5) / media.facts.fps
    frames = list(islice((frame for frame in media.frames(begin) if frame.time >= begin), count))
    if len(frames) == count:
        return iter(frames)
    # With a variable frame rate, too few frames may follow that time. In that case, select frames by number.
    return islice(media.frames(0), first, first + count)


def _shown_at(times: list[float], frames: Iterator[TimedFrame], period: float) -> Iterator[TimedFrame]:
    """Yields, for each time, the frame that is displayed then; the last frame lasts as long as an average frame."""
    # Timestamps are rounded, and those from phones jitter, so a frame may come a little early. The tolerance is less
    # than half a period: when the frame rate is halved, rounding would otherwise decide which of two frames is used.
    early = 0.3 * period
    remaining = iter(times)
    time = next(remaining)
    last: TimedFrame | None = None
    for frame in frames:
        while last is not None and time + early < frame.time:
            yield last
            following = next(remaining, None)
            if following is None:
                return
            time = following
        last = frame
    while last is not None and time < last.time + max(1.5 * period, 0.25):
        yield last
        following = next(remaining, None)
        if following is None:
            return
        time = following


def _cover(image: NDArray[np.uint8], fit: Fit, pixel_aspect: float) -> Tensor:
    """Crops the centre of an image to the aspect ratio of `fit` and resizes it to that size; uint8 [H, W, 3]."""
    height, width = image.shape[:2]
    scale = max(fit.height / height, fit.width / (width * pixel_aspect))
    high = min(height, max(1, round(fit.height / scale)))
    wide = min(width, max(1, round(fit.width / scale / pixel_aspect)))
    top, left = (height - high) // 2, (width - wide) // 2
    middle = torch.from_numpy(image)[top : top + high, left : left + wide]
    if (high, wide) == (fit.height, fit.width):
        return middle
    channels_first = middle.permute(2, 0, 1)[None]
    # With antialias=True, the result equals Pillow's and took a third of the time when measured.
    small = functional.interpolate(channels_first, (fit.height, fit.width), mode="bicubic", antialias=True)
    return small[0].permute(1, 2, 0)


def to_unit(frames: Tensor) -> Tensor:
    """Converts frames uint8 [F, H, W, 3] to the models' input format, float32 [3, F, H, W] in [-1, 1]."""
    return frames.permute(3, 0, 1, 2).to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1)


def from_unit(frames: Tensor) -> Tensor:
    """Converts frames [3, F, H, W] in [-1, 1] to uint8 [F, H, W, 3]."""
    return frames.permute(1, 2, 3, 0).float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8).contiguous()
