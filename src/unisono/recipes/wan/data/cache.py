"""The on-disk cache of latents and text embeddings; with it, training needs neither the VAE nor the text encoder.

The key of an entry is a hash of everything that the entry was computed from: the model's weights, the file, and the
sample's size (for videos also its frames and window). If any of these changes, so does the key, and a new entry is
computed. Several runs, ranks and settings can share one folder. No file name in the folder is derived from the data.

    latents/<hash>.safetensors   packs of latents
    masks/<hash>.safetensors     packs of masks at the latents' resolution
    text/<hash>.safetensors      packs of caption embeddings, without duplicates
    sizes/<hash>.safetensors     size of each sample after cropping; only with --no_cache
    conditions/<hash>.safetensors, image_embeddings/<hash>.safetensors   packs of given frames (image to video)
    bad/<key>.json               the reason why a file cannot be used
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.recipes.common.bad_files import BadFiles, BadMedia, usable_samples
from unisono.recipes.common.fingerprint import Keys
from unisono.recipes.common.packs import PackEntry, PackReader, Packs
from unisono.recipes.wan.condition.cached import ConditionCache, ConditionSettings
from unisono.recipes.wan.condition.image_encoder import ImageEncoder
from unisono.recipes.wan.data.cache_fill import Finish, fill, loaded_on_demand
from unisono.recipes.wan.data.cached import CachedSamples
from unisono.recipes.wan.data.crop import Crop, MediaKeys, local_media_of, short_videos
from unisono.recipes.wan.data.masks import MaskCache
from unisono.recipes.wan.data.precomputed import read_embedding, read_latent
from unisono.recipes.wan.data.sources import Source
from unisono.recipes.wan.models.text import TextEncoder, pad
from unisono.recipes.wan.models.vae import Geometry, WanVae

_FORMAT = 1  # part of every cache key, so entries in another format are never found
_HALF = False  # part of every latent's key; latents are stored in float32, not in 16 bit


@dataclass(frozen=True)
class CacheSettings:
    """The settings that a cache's content depends on, in addition to the files."""

    vae: str
    """Fingerprint of the VAE."""
    text: str
    """Fingerprint of the tokenizer and the text encoder."""
    geometry: Geometry
    text_width: int
    text_length: int
    crop: Crop
    text_dtype: torch.dtype = torch.bfloat16
    statistics: tuple[Tensor, Tensor] | None = None
    """Mean and standard deviation to normalise the user's latents with; None if the latents are normalised already."""
    masked: bool = False
    """Whether the masks beside the samples are used."""
    condition: ConditionSettings | None = None
    """The given frames of an image-to-video model; None for other models."""


class Cache:
    """The cached latents and text embeddings of a list of samples."""

    def __init__(
        self,
        folder: Path,
        sources: Sequence[Source],
        settings: CacheSettings,
        captions: Sequence[str] = ("",),
    ) -> None:
        """`captions` are cached in addition to the samples' captions, such as the empty one for caption dropout."""
        if settings.crop.start == "random":
            raise ConfigError("window random: a random window cannot be cached; use head or middle, or --no_cache")
        self._sources, self._settings = sources, settings
        self._latents = Packs(folder / "latents", self._is_latent)
        self._texts = Packs(folder / "text", self._is_text)
        self._bad = BadFiles(folder / "bad")
        self._masks: MaskCache | None = None
        if settings.masked:
            self._masks = MaskCache(folder, sources, self._latent_keys, settings.crop, settings.geometry)
        self._condition: ConditionCache | None = None
        if settings.condition is not None:
            of_latents = (settings.crop, settings.geometry, settings.vae, self._latent_keys)
            self._condition = ConditionCache(folder, sources, settings.condition, *of_latents, self._bad)
        self._caption_keys = Keys("caption", _FORMAT, settings.text, settings.text_length, str(settings.text_dtype))
        self._extra = {self._caption_keys.of_text(caption): Source("", None, caption) for caption in captions}
        self._extra_entries: dict[str, PackEntry] = {}

    def fill(
        self,
        work: Work,
        text_encoder: Callable[[], TextEncoder],
        vae: Callable[[], WanVae],
        image_encoder: Callable[[], ImageEncoder] | None = None,
    ) -> None:
        """Computes this rank's share of the missing entries; loads a model only if an entry needs it."""
        captions = {**self._extra, **dict(zip(self._text_keys, self._sources, strict=True))}
        with loaded_on_demand(text_encoder, work.device) as encoder:
            fill(work, self._texts, self._bad, "encoding captions", captions, partial(self._read_text, encoder))
        latents = dict(zip(self._latent_keys, self._sources, strict=True))
        with loaded_on_demand(vae, work.device) as loaded_vae:
            read = partial(self._read_latent, loaded_vae)
            fill(work, self._latents, self._bad, "encoding latents", latents, read)
        if self._masks:
            self._masks.fill(work, self._bad)
        if self._condition is not None:
            self._condition.fill(work, vae, image_encoder)

    def _is_latent(self, entry: PackEntry) -> bool:
        geometry, shape = self._settings.geometry, entry.shape
        is_latent = len(shape) == 4 and shape[0] == geometry.channels and entry.dtype == torch.float32
        return is_latent and not (shape[2] % geometry.patch or shape[3] % geometry.patch)

    def _is_text(self, entry: PackEntry) -> bool:
        settings, shape = self._settings, entry.shape
        is_embedding = len(shape) == 2 and shape[0] <= settings.text_length and shape[1] == settings.text_width
        return is_embedding and entry.dtype == settings.text_dtype

    def _read_text(self, encoder: Callable[[], TextEncoder], source: Source) -> Finish:
        settings = self._settings
        if source.embedding is not None:
            rows = read_embedding(source.embedding, settings.text_width, settings.text_length)
            return lambda: rows.to(settings.text_dtype)
        caption = source.caption or ""
        return lambda: encoder().encode([caption], settings.text_length)[0].to(settings.text_dtype)

    def _read_latent(self, vae: Callable[[], WanVae], source: Source) -> Finish:
        settings = self._settings
        if source.latent is not None:
            latent = read_latent(source.latent, settings.geometry, settings.statistics)
            return lambda: latent
        with local_media_of(source) as path:
            frames = settings.crop.read(path, settings.crop.fit(path, settings.geometry.multiple))

        def finish() -> Tensor:
            latent = vae().encode_frames(frames[None])[0]
            if not latent.isfinite().all():
                raise BadMedia(source.media or Path(source.name), "the VAE's latent of it is not finite")
            return latent

        return finish

    def open(self, leave_out_bad: bool = False) -> CachedSamples:
        """Opens the samples after all ranks have filled their shares. With `leave_out_bad`, skips unusable samples."""
        latents, texts = self._latents.find(), self._texts.find()
        needed: list[tuple[Container[str], Sequence[str]]] = [(latents, self._latent_keys), (texts, self._text_keys)]
        if self._masks:
            needed.append((self._masks.find(), self._masks.keys))
        if self._condition:
            needed += self._condition.needed()
        good, remarks = usable_samples(self._sources, needed, self._bad, leave_out_bad)
        captions = list(dict.fromkeys(self._text_keys[index] for index in good))
        number = {key: index for index, key in enumerate(captions)}
        entries = [latents[self._latent_keys[index]] for index in good]
        data = CachedSamples(
            [self._sources[index] for index in good],
            [entry.shape for entry in entries],
            self._settings.geometry,
            PackReader(self._latents.folder, entries),
            PackReader(self._texts.folder, [texts[key] for key in captions]),
            [number[self._text_keys[index]] for index in good],
            self._settings.text_length,
            self._masks.open(good) if self._masks else None,
            self._condition.readers(good) if self._condition else None,
        )
        frames = (1 + (entry.shape[1] - 1) * self._settings.geometry.temporal_factor for entry in entries)
        data.remarks = remarks + short_videos(data.sources, frames, self._settings.crop.num_frames)
        return data

    def num_truncated(self) -> int:
        """Returns the number of `captions` that fill the whole text length and were therefore probably truncated."""
        entries, length = self._texts.find(), self._settings.text_length
        return sum(entries[key].shape[0] >= length for key in self._extra if key in entries)

    def text(self, caption: str) -> Tensor:
        """Returns the embedding of one of `captions`, [text length, width]."""
        key = self._caption_keys.of_text(caption)
        if key not in self._extra_entries:  # finds all of `captions` at once, because reading the index is slow
            entries = self._texts.find()
            self._extra_entries = {key: entries[key] for key in self._extra if key in entries}
        return pad(PackReader(self._texts.folder, [self._extra_entries[key]])[0], self._settings.text_length)

    @cached_property
    def _latent_keys(self) -> list[str]:
        settings, geometry = self._settings, self._settings.geometry
        media_keys = MediaKeys(
            settings.crop,
            lambda crop: Keys("media", _FORMAT, settings.vae, geometry.multiple, asdict(crop), _HALF),
        )
        raw = settings.statistics and [part.flatten().tolist() for part in settings.statistics]
        latent_keys = Keys("latent", _FORMAT, geometry.channels, geometry.patch, _HALF, *([raw] if raw else []))
        return [
            media_keys.of(source) if source.latent is None else latent_keys.of_file(source.name, source.latent)
            for source in self._sources
        ]

    @cached_property
    def _text_keys(self) -> list[str]:
        settings = self._settings
        embedding_keys = Keys("embedding", _FORMAT, settings.text_length, settings.text_width, str(settings.text_dtype))
        return [
            self._caption_keys.of_text(source.caption or "")
            if source.embedding is None
            else embedding_keys.of_file(source.name, source.embedding)
            for source in self._sources
        ]
