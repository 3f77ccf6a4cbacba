"""Latents and embeddings computed once and kept on disk; training then needs neither VAE nor text encoder.

Everything is kept under a key that names all it was computed from: the model's weights, the size, of films also frames
and window, and the file. What changes is computed anew, what comes back is found again, and several runs, ranks and
settings may share one folder. Nothing in it has a name that comes from the data.

    latents/<hash>.safetensors   packs of latents
    text/<hash>.safetensors      packs of the rows of captions, each distinct caption once
    sizes/<hash>.safetensors     without a cache: what each sample is cut to
    bad/<key>.json               what is wrong with a file that could not be used
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.recipes.common.bad_files import BadFiles, BadMedia, usable
from unisono.recipes.common.fingerprint import Keys
from unisono.recipes.common.packs import Kept, Packs, Shelf
from unisono.recipes.wan.data.cached import Cached
from unisono.recipes.wan.data.cut import Cut, MediaKeys, media_of, short_films
from unisono.recipes.wan.data.filling import Finish, borrowed, fill
from unisono.recipes.wan.data.precomputed import read_embedding, read_latent
from unisono.recipes.wan.data.sources import Source
from unisono.recipes.wan.models.text import TextEncoder, pad
from unisono.recipes.wan.models.vae import Geometry, Latents

_FORMAT = 1  # of what is kept; what has another one is not found


@dataclass(frozen=True)
class CacheSettings:
    """What decides the content of a cache, besides the files."""

    vae: str
    """The fingerprint of the VAE."""
    text: str
    """The fingerprint of tokenizer and text encoder."""
    geometry: Geometry
    text_width: int
    text_length: int
    cut: Cut
    text_dtype: torch.dtype = torch.bfloat16
    half: bool = False
    """Keep latents in bfloat16: half the space, and no longer exactly what the VAE gave."""
    statistics: tuple[Tensor, Tensor] | None = None
    """Latents that lie beside the data are raw, and normalised with this mean and deviation. None: they are already."""


class Cache:
    """The cache of a list of samples."""

    def __init__(
        self,
        folder: Path,
        sources: Sequence[Source],
        settings: CacheSettings,
        captions: Sequence[str] = ("",),
    ) -> None:
        """`captions` are kept too, besides those of the samples; the empty one is what dropping a caption needs."""
        if settings.cut.start == "random":
            raise ConfigError("a window that begins at random cannot be cached; use head or middle, or --no_cache")
        self._sources, self._settings = sources, settings
        self._latents = Packs(folder / "latents", self._is_latent)
        self._texts = Packs(folder / "text", self._is_text)
        self._bad = BadFiles(folder / "bad")
        self._of_caption = Keys("caption", _FORMAT, settings.text, settings.text_length, str(settings.text_dtype))
        self._further = {self._of_caption.of_text(caption): Source("", None, caption) for caption in captions}
        self._found: dict[str, Kept] = {}

    def fill(self, work: Work, text_encoder: Callable[[], TextEncoder], vae: Callable[[], Latents]) -> None:
        """Computes this process's share of what is missing; a model is loaded only if it is needed."""
        captions = {**self._further, **dict(zip(self._text_keys, self._sources, strict=True))}
        with borrowed(text_encoder, work.device) as encoder:
            fill(work, self._texts, self._bad, "captions", captions, partial(self._read_text, encoder))
        latents = dict(zip(self._latent_keys, self._sources, strict=True))
        with borrowed(vae, work.device) as encoder_of_frames:
            fill(work, self._latents, self._bad, "latents", latents, partial(self._read_latent, encoder_of_frames))

    def _is_latent(self, kept: Kept) -> bool:
        geometry, shape = self._settings.geometry, kept.shape
        like = len(shape) == 4 and shape[0] == geometry.channels
        return like and not (shape[2] % geometry.patch or shape[3] % geometry.patch) and kept.dtype == self._dtype

    def _is_text(self, kept: Kept) -> bool:
        settings, shape = self._settings, kept.shape
        like = len(shape) == 2 and shape[0] <= settings.text_length and shape[1] == settings.text_width
        return like and kept.dtype == settings.text_dtype

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self._settings.half else torch.float32

    def _read_text(self, encoder: Callable[[], TextEncoder], source: Source) -> Finish:
        settings = self._settings
        if source.embedding is not None:
            rows = read_embedding(source.embedding, settings.text_width, settings.text_length)
            return lambda: rows.to(settings.text_dtype)
        caption = source.caption or ""
        return lambda: encoder().encode([caption], settings.text_length)[0].to(settings.text_dtype)

    def _read_latent(self, vae: Callable[[], Latents], source: Source) -> Finish:
        settings, dtype = self._settings, self._dtype
        if source.latent is not None:
            latent = read_latent(source.latent, settings.geometry, settings.statistics)
            return lambda: latent.to(dtype)
        path = media_of(source)
        frames = settings.cut.read(path, settings.cut.fit(path, settings.geometry.multiple))

        def finish() -> Tensor:
            latent = vae().encode_pictures(frames[None])[0]
            if not latent.isfinite().all():
                raise BadMedia(path, "the VAE gives numbers for it that are not finite")
            return latent.to(dtype)

        return finish

    def open(self, leave_out_bad: bool = False) -> Cached:
        """The samples, once all processes have filled their share. Bad ones are an error, or left out."""
        latents, texts = self._latents.find(), self._texts.find()
        needed = [(latents, self._latent_keys), (texts, self._text_keys)]
        kept, remarks = usable(self._sources, needed, self._bad, leave_out_bad)
        captions = list(dict.fromkeys(self._text_keys[index] for index in kept))
        number = {key: index for index, key in enumerate(captions)}
        found = [latents[self._latent_keys[index]] for index in kept]
        data = Cached(
            [self._sources[index] for index in kept],
            [entry.shape for entry in found],
            self._settings.geometry,
            Shelf(self._latents.folder, found),
            Shelf(self._texts.folder, [texts[key] for key in captions]),
            [number[self._text_keys[index]] for index in kept],
            self._settings.text_length,
        )
        frames = (1 + (entry.shape[1] - 1) * self._settings.geometry.time for entry in found)
        data.remarks = remarks + short_films(data.sources, frames, self._settings.cut.num_frames)
        return data

    def num_reaching(self, rows: int) -> int:
        """How many of `captions` have so many rows: the text length cuts them off, or just does not."""
        there = self._texts.find()
        return sum(there[key].shape[0] >= rows for key in self._further if key in there)

    def text(self, caption: str) -> Tensor:
        """[text length, width] what the transformer gets for one of `captions`."""
        key = self._of_caption.of_text(caption)
        if key not in self._found:  # all at once: looking through the packs of a large cache takes a while
            there = self._texts.find()
            self._found = {key: there[key] for key in self._further if key in there}
        return pad(Shelf(self._texts.folder, [self._found[key]])[0], self._settings.text_length)

    @cached_property
    def _latent_keys(self) -> list[str]:
        settings, geometry = self._settings, self._settings.geometry
        of_media = MediaKeys(
            settings.cut,
            lambda cut: Keys("media", _FORMAT, settings.vae, geometry.multiple, asdict(cut), settings.half),
        )
        raw = settings.statistics and [part.flatten().tolist() for part in settings.statistics]
        told = [geometry.channels, geometry.patch, settings.half, *([raw] if raw else [])]
        of_latent = Keys("latent", _FORMAT, *told)
        return [
            of_media.of(source) if source.latent is None else of_latent.of_file(source.name, source.latent)
            for source in self._sources
        ]

    @cached_property
    def _text_keys(self) -> list[str]:
        settings = self._settings
        of_embedding = Keys("embedding", _FORMAT, settings.text_length, settings.text_width, str(settings.text_dtype))
        return [
            self._of_caption.of_text(source.caption or "")
            if source.embedding is None
            else of_embedding.of_file(source.name, source.embedding)
            for source in self._sources
        ]
