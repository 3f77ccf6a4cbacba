"""The dataset for training without a cache: frames and captions are read and encoded in every step.

Only the size of each sample is computed in advance, because the engine needs the samples' shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.recipes.common.bad_files import BadFiles, usable_samples
from unisono.recipes.common.fingerprint import Keys
from unisono.recipes.common.packs import PackReader, Packs
from unisono.recipes.wan.condition.given import GivenFrames
from unisono.recipes.wan.condition.kind import ConditionKind
from unisono.recipes.wan.data import media
from unisono.recipes.wan.data.cache_fill import Finish, fill
from unisono.recipes.wan.data.cached import Shape, ShapedSamples
from unisono.recipes.wan.data.crop import Crop, MediaKeys, media_of, short_videos
from unisono.recipes.wan.data.masks import check_same_frames, read_mask
from unisono.recipes.wan.data.media import Fit
from unisono.recipes.wan.data.sources import Source
from unisono.recipes.wan.models.vae import Geometry


class UncachedSamples(ShapedSamples):
    """Frames and captions, to be encoded in every step by `WanVae.encode_frames` and `TextEncoder.encode`.

    With `given`, a sample also contains its given frames, for `condition_channels` and `ImageEncoder.encode`.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        fits: Sequence[Fit],
        geometry: Geometry,
        crop: Crop,
        masked: bool = False,
        given: GivenFrames | None = None,
    ) -> None:
        super().__init__(sources, [geometry.shape(fit.frames, fit.height, fit.width) for fit in fits], geometry)
        self._fits, self._crop, self._masked, self._given = list(fits), crop, masked, given

    def __getitem__(self, index: int) -> dict[str, Any]:
        source = self.sources[index]
        before = torch.get_rng_state()
        frames = self._crop.read(media_of(source), self._fits[index])
        item: dict[str, Any] = {"frames": frames, "caption": source.caption or ""}
        if self._masked:
            after = torch.get_rng_state()
            torch.set_rng_state(before)  # so that the mask gets the same random window as its video
            item["mask"] = self._mask(source, self.shape(index))
            torch.set_rng_state(after)
        if self._given is not None:
            item["given"] = self._given.chosen(source, self._fits[index], frames)
        return {**item, "index": index}

    def _mask(self, source: Source, shape: Shape) -> Tensor:
        return torch.ones(1, *shape[1:]) if source.mask is None else read_mask(source, self._crop, self._geometry)

    def subset(self, indices: Sequence[int]) -> Self:
        """Returns the samples with these indices, in this order."""
        some = super().subset(indices)
        some._fits = [self._fits[index] for index in indices]
        return some


class SampleSizes:
    """The size of each sample after cropping; all ranks together compute the sizes once and store them."""

    def __init__(
        self,
        folder: Path,
        sources: Sequence[Source],
        crop: Crop,
        geometry: Geometry,
        masked: bool = False,
        condition: ConditionKind | None = None,
    ) -> None:
        """`condition` names the frames that an image-to-video model is given; None for other models."""
        for source in sources:
            if source.latent is not None or source.embedding is not None:
                raise ConfigError(
                    f"{source.name} has its own latent or embedding file, which only the cache uses; remove "
                    "--no_cache, or move those files away"
                )
        self._sources, self._crop, self._geometry, self._masked = sources, crop, geometry, masked
        self._given = None if condition is None else GivenFrames(condition, crop, geometry)
        self._sizes, self._bad = Packs(folder / "sizes"), BadFiles(folder / "bad")

    def fill(self, work: Work) -> None:
        """Reads the sizes of this rank's share of the files."""
        sources = dict(zip(self._keys, self._sources, strict=True))
        fill(work, self._sizes, self._bad, "reading sizes", sources, self._measure)

    def _measure(self, source: Source) -> Finish:
        path = media_of(source)
        fit = self._crop.fit(path, self._geometry.multiple)
        if self._masked and source.mask is not None:
            check_same_frames(source.mask, media.probe(path), "mask")
        if self._given is not None:
            self._given.check(source, self._given.fit(source))
        size = torch.tensor([fit.frames, fit.height, fit.width])
        return lambda: size

    def open(self, leave_out_bad: bool = False) -> UncachedSamples:
        """Opens the samples after all ranks have filled their shares. With `leave_out_bad`, skips unusable samples."""
        entries = self._sizes.find()
        good, remarks = usable_samples(self._sources, [(entries, self._keys)], self._bad, leave_out_bad)
        sizes = PackReader(self._sizes.folder, [entries[self._keys[index]] for index in good])
        fits = [Fit(*sizes[number].tolist()) for number in range(len(good))]
        some = [self._sources[index] for index in good]
        data = UncachedSamples(some, fits, self._geometry, self._crop, self._masked, self._given)
        data.remarks = remarks + short_videos(data.sources, (fit.frames for fit in fits), self._crop.num_frames)
        return data

    @cached_property
    def _keys(self) -> list[str]:
        keys = MediaKeys(self._crop, lambda crop: Keys("size", self._geometry.multiple, asdict(crop)))
        sizes = [keys.of(source) for source in self._sources]
        if self._given is not None:
            with_given = Keys("size with given frames")
            sizes = [
                with_given.of_text(
                    "\0".join([size, *(with_given.of_file("", picture) for picture in pictures if picture)])
                )
                for size, pictures in zip(sizes, map(self._given.pictures_of, self._sources), strict=True)
            ]
        if not self._masked:
            return sizes
        with_mask = Keys("size with mask")
        return [
            size if source.mask is None else with_mask.of_file(size, source.mask)
            for size, source in zip(sizes, self._sources, strict=True)
        ]
