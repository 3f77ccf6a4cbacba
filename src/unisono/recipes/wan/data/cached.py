"""Datasets whose samples have known shapes, and the dataset of cached latents."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from torch.utils.data import Dataset

from unisono.recipes.common.packs import PackReader
from unisono.recipes.wan.data.masks import CachedMasks
from unisono.recipes.wan.data.sources import Source
from unisono.recipes.wan.models.text import pad
from unisono.recipes.wan.models.vae import Geometry

Shape = tuple[int, ...]
"""Shape of a latent: channels, frames, height, width."""


class ShapedSamples(Dataset[dict[str, Any]]):
    """Samples whose latent shapes are known without reading them.

    The engine uses the shapes to build micro-batches of equal shape and to give every rank the same amount of work.
    """

    def __init__(self, sources: Sequence[Source], shapes: Sequence[Shape], geometry: Geometry) -> None:
        self.sources = list(sources)
        self.remarks: list[str] = []
        """Notes about the samples for the user, one line each."""
        # Uses arrays: with a million Python objects, every forked worker would copy their memory pages as soon as it
        # changes their reference counts.
        self._geometry, self._shapes = geometry, sorted(set(shapes))
        number = {shape: index for index, shape in enumerate(self._shapes)}
        self._shape = np.array([number[shape] for shape in shapes], dtype=np.int32)

    def __len__(self) -> int:
        return len(self._shape)

    def shape(self, index: int) -> Shape:
        """Returns the shape of a sample's latent."""
        return self._shapes[int(self._shape[index])]

    @property
    def distinct_shapes(self) -> list[Shape]:
        """The distinct shapes of all samples."""
        return self._shapes

    def cost(self, index: int) -> float:
        """Returns the cost of computing a sample: its number of tokens."""
        return float(self._geometry.tokens(self.shape(index)))

    def subset(self, indices: Sequence[int]) -> Self:
        """Returns the samples with these indices, in this order."""
        some = copy.copy(self)
        some.sources = [self.sources[index] for index in indices]
        some._shape = self._shape[list(indices)]
        return some


class CachedSamples(ShapedSamples):
    """Cached latents, caption embeddings and, for image-to-video models, conditions."""

    def __init__(
        self,
        sources: Sequence[Source],
        shapes: Sequence[Shape],
        geometry: Geometry,
        latents: PackReader,
        texts: PackReader,
        text_of: Sequence[int],
        text_length: int,
        masks: CachedMasks | None = None,
        others: Mapping[str, PackReader] | None = None,
    ) -> None:
        """`others` holds further tensors per sample, keyed by their names in a batch and ordered like `latents`."""
        super().__init__(sources, shapes, geometry)
        self._latents, self._latent_of = latents, np.arange(len(shapes), dtype=np.int32)
        self._texts, self._text_of = texts, np.array(text_of, dtype=np.int32)
        self._text_length, self._masks, self._others = text_length, masks, dict(others or {})

    def __getitem__(self, index: int) -> dict[str, Any]:
        item: dict[str, Any] = {
            "latent": self._latents[self._latent_of[index]],
            "text": pad(self._texts[self._text_of[index]], self._text_length),
            "index": index,
            **{name: reader[self._latent_of[index]] for name, reader in self._others.items()},
        }
        if self._masks is not None:
            item["mask"] = self._masks.mask(int(self._latent_of[index]), item["latent"].shape)
        return item

    def subset(self, indices: Sequence[int]) -> Self:
        """Returns the samples with these indices, in this order."""
        some = super().subset(indices)
        some._latent_of, some._text_of = self._latent_of[list(indices)], self._text_of[list(indices)]
        return some
