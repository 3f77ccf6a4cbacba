"""How pictures and films of any size become samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from torch import Tensor

from unisono.errors import ConfigError
from unisono.recipes.common.fingerprint import Keys
from unisono.recipes.wan.data import media
from unisono.recipes.wan.data.decode import is_still
from unisono.recipes.wan.data.media import FILMS, Fit, MediaFacts
from unisono.recipes.wan.data.sources import Source


@dataclass(frozen=True)
class Cut:
    """What a sample is cut to, and where in a film it begins."""

    num_frames: int
    """Frames of a window, 4k + 1; a shorter film gives the longest one it has."""
    height: int = 0
    width: int = 0
    """In pixels; 0 and 0: every sample keeps its proportions."""
    max_pixels: int = 0
    """Of a frame that keeps its proportions; 0: any number."""
    fps: float = 0.0
    """Frames per second that films are brought to; 0: as they are."""
    start: str = "head"
    """Where in a longer film the window begins: head, middle, random."""

    def of(self, path: Path) -> Cut:
        """What of it matters for a file: a still picture has no window, whatever that is for films."""
        return replace(self, num_frames=1, fps=0.0, start="head") if is_still(path) else self

    def check(self, multiple: int) -> None:
        """Refuses (ConfigError) sizes that no sample can be cut to."""
        self._fit(MediaFacts(1, multiple, multiple, 0.0), multiple)

    def fit(self, path: Path, multiple: int) -> Fit:
        """What a file is cut to, with sides that `multiple` divides."""
        return self._fit(media.probe(path), multiple)

    def _fit(self, facts: MediaFacts, multiple: int) -> Fit:
        size = {"height": self.height, "width": self.width, "max_pixels": self.max_pixels, "multiple": multiple}
        return media.fit(facts, num_frames=self.num_frames, fps=self.fps, **size)

    def read(self, path: Path, fit: Fit) -> Tensor:
        """uint8 [F, H, W, 3] the frames of a sample."""
        return media.read(path, fit, fps=self.fps, start=self.start)


def media_of(source: Source) -> Path:
    """The picture or film of a sample."""
    if source.media is None:
        raise ConfigError(f"{source.name}: there is neither a picture nor a film, nor a latent of it")
    return source.media


class MediaKeys:
    """Names for what is computed from pictures and films, each as it is cut."""

    def __init__(self, cut: Cut, like: Callable[[Cut], Keys]) -> None:
        self._cut, self._like = cut, cache(like)

    def of(self, source: Source) -> str:
        """The key of a sample."""
        path = media_of(source)
        return self._like(self._cut.of(path)).of_file(source.name, path)


def short_films(sources: Sequence[Source], frames: Iterable[int], full: int) -> list[str]:
    """What to say of films that have fewer than `full` frames; `frames` are those of each sample."""
    names = [
        source.name
        for source, own in zip(sources, frames, strict=True)
        if own < full and source.latent is None and media_of(source).suffix.lower() in FILMS
    ]
    if not names:
        return []
    few = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return [f"films that are shorter than the window are used with the longest one they have ({len(names):,}: {few})"]
