"""Caches the conditions of samples: the channels with the mask and the given frames' latent, and image embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from unisono.engine.recipe import Work
from unisono.recipes.common.bad_files import BadFiles, BadMedia
from unisono.recipes.common.fingerprint import Keys
from unisono.recipes.common.packs import PackEntry, PackReader, Packs
from unisono.recipes.wan.condition.given import GivenFrames
from unisono.recipes.wan.condition.image_encoder import ImageEncoder
from unisono.recipes.wan.condition.inputs import condition_channels
from unisono.recipes.wan.condition.kind import ConditionKind
from unisono.recipes.wan.data.cache_fill import Finish, fill, loaded_on_demand
from unisono.recipes.wan.data.crop import Crop
from unisono.recipes.wan.data.precomputed import read_latent
from unisono.recipes.wan.data.sources import Source
from unisono.recipes.wan.models.vae import Geometry, WanVae

_FORMAT = 1  # part of every cache key, so entries in another format are never found


@dataclass(frozen=True)
class ConditionSettings:
    """The settings that cached conditions depend on, in addition to those that the latents depend on."""

    kind: ConditionKind
    image_encoder: str = ""
    """Fingerprint of the image encoder; empty for a model without one."""


class ConditionCache:
    """Stores and reads the conditions of a list of samples in a cache folder."""

    def __init__(
        self,
        folder: Path,
        sources: Sequence[Source],
        settings: ConditionSettings,
        crop: Crop,
        geometry: Geometry,
        vae: str,
        latent_keys: Sequence[str],
        bad: BadFiles,
    ) -> None:
        """`vae` is the VAE's fingerprint. A sample's condition gets a new key whenever the sample's latent does."""
        self._sources, self._settings, self._geometry, self._bad = sources, settings, geometry, bad
        self._given = GivenFrames(settings.kind, crop, geometry)
        self._channels = Packs(folder / "conditions", self._is_condition)
        self._images = Packs(folder / "image_embeddings", self._is_embedding)
        self._keys = {
            "condition": self._keys_of(Keys("condition", _FORMAT, settings.kind.frames, vae), latent_keys),
            "image": self._keys_of(
                Keys("image embedding", _FORMAT, settings.kind.frames, settings.image_encoder), latent_keys
            ),
        }

    def _keys_of(self, keys: Keys, latent_keys: Sequence[str]) -> list[str]:
        return [
            keys.of_text("\0".join([latent, *(keys.of_file(source.name, it) if it else "" for it in pictures)]))
            for latent, source in zip(latent_keys, self._sources, strict=True)
            for pictures in [self._given.pictures_of(source)]
        ]

    def fill(
        self, work: Work, vae: Callable[[], WanVae], image_encoder: Callable[[], ImageEncoder] | None = None
    ) -> None:
        """Computes this rank's share of the missing entries; loads a model only if an entry needs it."""
        items = dict(zip(self._keys["condition"], self._sources, strict=True))
        with loaded_on_demand(vae, work.device) as loaded_vae:
            read = partial(self._read_channels, loaded_vae)
            fill(work, self._channels, self._bad, "encoding given frames", items, read)
        if self._settings.kind.has_embedding:
            assert image_encoder is not None
            items = dict(zip(self._keys["image"], self._sources, strict=True))
            with loaded_on_demand(image_encoder, work.device) as loaded_encoder:
                embed = partial(self._read_embedding, loaded_encoder)
                fill(work, self._images, self._bad, "embedding given frames", items, embed)

    def _parts(self) -> dict[str, Packs]:
        return {"condition": self._channels, **({"image": self._images} if self._settings.kind.has_embedding else {})}

    def needed(self) -> list[tuple[dict[str, PackEntry], list[str]]]:
        """Returns, for each part of the condition, the entries in the cache and the keys of all samples."""
        return [(packs.find(), self._keys[name]) for name, packs in self._parts().items()]

    def readers(self, indices: Sequence[int]) -> dict[str, PackReader]:
        """Returns a reader for each part of these samples' conditions, keyed by the part's name in a batch."""
        readers = {}
        for name, packs in self._parts().items():
            entries, keys = packs.find(), self._keys[name]
            readers[name] = PackReader(packs.folder, [entries[keys[index]] for index in indices])
        return readers

    def _read_channels(self, vae: Callable[[], WanVae], source: Source) -> Finish:
        given, num_frames = self._read(source)

        def finish() -> Tensor:
            channels = condition_channels(vae(), given, num_frames)
            if not channels.isfinite().all():
                raise BadMedia(source.media or Path(source.name), "the VAE's latent of its given frames is not finite")
            return channels

        return finish

    def _read_embedding(self, encoder: Callable[[], ImageEncoder], source: Source) -> Finish:
        given, _ = self._read(source)
        return lambda: encoder().encode(given)

    def _read(self, source: Source) -> tuple[Tensor, int]:
        latent = () if source.latent is None else tuple(read_latent(source.latent, self._geometry).shape)
        return self._given.read(source, latent)

    def _is_condition(self, entry: PackEntry) -> bool:
        geometry, shape = self._geometry, entry.shape
        is_condition = len(shape) == 4 and shape[0] == geometry.channels + geometry.temporal_factor
        return is_condition and entry.dtype == torch.float32

    def _is_embedding(self, entry: PackEntry) -> bool:
        is_embedding = len(entry.shape) == 3 and entry.shape[0] == self._settings.kind.num_frames
        return is_embedding and entry.dtype == torch.float32
