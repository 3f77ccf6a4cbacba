"""How pictures and films of any size become samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from unisono.errors import ConfigError
from unisono.recipes.wan.data import media
from unisono.recipes.wan.data.media import FILMS, Fit
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

    def fit(self, path: Path, multiple: int) -> Fit:
        """What a file is cut to, with sides that `multiple` divides."""
        size = {"height": self.height, "width": self.width, "max_pixels": self.max_pixels, "multiple": multiple}
        return media.fit(media.probe(path), num_frames=self.num_frames, fps=self.fps, **size)

    def read(self, path: Path, fit: Fit) -> Tensor:
        """uint8 [F, H, W, 3] the frames of a sample."""
        return media.read(path, fit, fps=self.fps, start=self.start)


def media_of(source: Source) -> Path:
    """The picture or film of a sample."""
    if source.media is None:
        raise ConfigError(f"{source.name}: there is neither a picture nor a film, nor a latent of it")
    return source.media


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
