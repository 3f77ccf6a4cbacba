"""Chooses how an image or video of any size becomes a sample: its frames, size and window."""

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
    """The size of a sample, and where its window starts in a video. Cache keys contain these fields."""

    num_frames: int
    """Frames per window, of the form 4k + 1; a shorter video uses the longest window that it contains."""
    height: int = 0
    width: int = 0
    """Height and width in pixels. If both are 0, every sample keeps its aspect ratio."""
    max_pixels: int = 0
    """Largest number of pixels of a frame that keeps its aspect ratio; 0: no limit."""
    fps: float = 0.0
    """Frames per second to resample videos to; 0 keeps each video's own frame rate."""
    start: str = "head"
    """Position of the window in a longer video: head, middle or random."""

    def of(self, path: Path) -> Crop:
        """The settings that affect a file. For a still image, the window is a single frame."""
        return replace(self, num_frames=1, fps=0.0, start="head") if is_still(path) else self

    def check(self, multiple: int) -> None:
        """Raises ConfigError for sizes that no sample can have."""
        self._fit(MediaFacts(1, multiple, multiple, 0.0), multiple)

    def fit(self, path: Path, multiple: int) -> Fit:
        """The frames and size of a file's sample, with sides divisible by `multiple`."""
        return self._fit(media.probe(path), multiple)

    def _fit(self, facts: MediaFacts, multiple: int) -> Fit:
        size = {"height": self.height, "width": self.width, "max_pixels": self.max_pixels, "multiple": multiple}
        return media.fit(facts, num_frames=self.num_frames, fps=self.fps, **size)

    def read(self, path: Path, fit: Fit) -> Tensor:
        """Reads the frames of a sample, uint8 [F, H, W, 3]."""
        return media.read(path, fit, fps=self.fps, start=self.start)


def media_of(source: Source) -> Path:
    """The image or video of a sample."""
    if source.media is None:
        raise ConfigError(f"{source.name} has no image, video or latent")
    return source.media


@contextmanager
def local_media_of(source: Source) -> Iterator[Path]:
    """The image or video of a sample as a file: a temporary one, if it is in a tar shard."""
    if source.packed is None:
        yield media_of(source)
        return
    with source.packed.as_file(source.name) as path:
        yield path


class MediaKeys:
    """Cache keys of images and videos, which depend on how they are cropped."""

    def __init__(self, crop: Crop, keys_for: Callable[[Crop], Keys]) -> None:
        self._crop, self._keys_for = crop, cache(keys_for)

    def of(self, source: Source) -> str:
        """The key of a sample."""
        if source.packed is not None:
            return self._keys_for(self._crop).of_text(f"{source.name}\0{source.packed.identity}")
        path = media_of(source)
        return self._keys_for(self._crop.of(path)).of_file(source.name, path)


def short_videos(sources: Sequence[Source], frames: Iterable[int], full: int) -> list[str]:
    """A remark about videos with fewer than `full` frames; `frames` holds the number of frames of each sample."""
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
