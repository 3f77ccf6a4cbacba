"""Chooses the frames, size and window of the sample that is made from an image or video of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from torch import Tensor

from unisono.errors import ConfigError
from unisono.recipes.common.fingerprint import Keys
from unisono.recipes.common.streams import VIDEO_SUFFIXES
from unisono.recipes.wan.data import media
from unisono.recipes.wan.data.decode import MediaFacts, is_still
from unisono.recipes.wan.data.media import Fit
from unisono.recipes.wan.data.sources import Source


@dataclass(frozen=True)
class Crop:
    """The settings that determine a sample's size and where its window starts in a video; part of the cache keys."""

    num_frames: int
    """Frames per window, of the form 4k + 1; a shorter video uses the longest window that it contains."""
    height: int = 0
    width: int = 0
    """Height and width in pixels. If both are 0, every sample keeps its aspect ratio."""
    max_pixels: int = 0
    """Largest number of pixels per frame if samples keep their aspect ratio; 0: no limit."""
    fps: float = 0.0
    """Frames per second to resample videos to; 0 keeps each video's own frame rate."""
    start: str = "head"
    """Position of the window in a longer video: head, middle or random."""

    def of(self, path: Path) -> Crop:
        """Returns only the settings that affect this file: for a still image, the window is a single frame."""
        return replace(self, num_frames=1, fps=0.0, start="head") if is_still(path) else self

    def check(self, multiple: int) -> None:
        """Raises ConfigError if the settings ask for a size that no sample can have."""
        self._fit(MediaFacts(1, multiple, multiple, 0.0), multiple)

    def fit(self, path: Path, multiple: int) -> Fit:
        """Returns the frame count and size of a file's sample, with sides divisible by `multiple`."""
        return self._fit(media.probe(path), multiple)

    def _fit(self, facts: MediaFacts, multiple: int) -> Fit:
        size = {"height": self.height, "width": self.width, "max_pixels": self.max_pixels, "multiple": multiple}
        return media.fit(facts, num_frames=self.num_frames, fps=self.fps, **size)

    def read(self, path: Path, fit: Fit) -> Tensor:
        """Reads the frames of a sample, uint8 [F, H, W, 3]."""
        return media.read(path, fit, fps=self.fps, start=self.start)


def media_of(source: Source) -> Path:
    """Returns the path of a sample's image or video."""
    if source.media is None:
        raise ConfigError(f"{source.name} has no image, video or latent")
    return source.media


@contextmanager
def local_media_of(source: Source) -> Iterator[Path]:
    """Yields the path of a sample's image or video: a temporary file if the sample is in a tar shard."""
    if source.packed is None:
        yield media_of(source)
        return
    with source.packed.as_file(source.name) as path:
        yield path


class MediaKeys:
    """Computes the cache keys of images and videos, which depend on the crop."""

    def __init__(self, crop: Crop, keys_for: Callable[[Crop], Keys]) -> None:
        self._crop, self._keys_for = crop, cache(keys_for)

    def of(self, source: Source) -> str:
        """Returns the key of a sample."""
        if source.packed is not None:
            return self._keys_for(self._crop).of_text(f"{source.name}\0{source.packed.identity}")
        path = media_of(source)
        return self._keys_for(self._crop.of(path)).of_file(source.name, path)


def short_videos(sources: Sequence[Source], frames: Iterable[int], full: int) -> list[str]:
    """Returns a remark if videos have fewer than `full` frames; `frames` holds the frame count of each sample."""
    names = [
        source.name
        for source, num_frames in zip(sources, frames, strict=True)
        if num_frames < full and source.latent is None and source.suffix in VIDEO_SUFFIXES
    ]
    if not names:
        return []
    few = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    count = "1 video is" if len(names) == 1 else f"{len(names):,} videos are"
    return [f"{count} shorter than num_frames and trained on fewer frames: {few}"]
