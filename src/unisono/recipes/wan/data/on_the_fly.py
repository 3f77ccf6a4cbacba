"""Training without a cache: frames and captions are read anew each time, and encoded where the model is.

Only what each sample is cut to is found out before, because the engine has to know the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.recipes.common.bad_files import BadFiles, usable
from unisono.recipes.common.fingerprint import Keys
from unisono.recipes.common.packs import Packs, Shelf
from unisono.recipes.wan.data.cached import ShapedSamples
from unisono.recipes.wan.data.cut import Cut, MediaKeys, media_of, short_films
from unisono.recipes.wan.data.filling import Finish, fill
from unisono.recipes.wan.data.media import Fit
from unisono.recipes.wan.data.sources import Source
from unisono.recipes.wan.models.vae import Geometry


class OnTheFly(ShapedSamples):
    """Frames and captions, of which `Latents.encode_pictures` and `TextEncoder.encode` make what a cache would hold."""

    def __init__(self, sources: Sequence[Source], fits: Sequence[Fit], geometry: Geometry, cut: Cut) -> None:
        super().__init__(sources, [geometry.shape(fit.frames, fit.height, fit.width) for fit in fits], geometry)
        self._fits, self._cut = list(fits), cut

    def __getitem__(self, index: int) -> dict[str, Any]:
        source = self.sources[index]
        frames = self._cut.read(media_of(source), self._fits[index])
        return {"frames": frames, "caption": source.caption or "", "index": index}

    def part(self, indices: Sequence[int]) -> Self:
        """Some of the samples, in this order."""
        some = super().part(indices)
        some._fits = [self._fits[index] for index in indices]
        return some


class Measured:
    """What each sample is cut to, found out once, shared over the ranks, and kept."""

    def __init__(self, folder: Path, sources: Sequence[Source], cut: Cut, geometry: Geometry) -> None:
        for source in sources:
            if source.latent is not None or source.embedding is not None:
                raise ConfigError(
                    f"{source.name} has a latent or an embedding beside it, and those are taken by the cache only; "
                    "leave --no_cache out, or move those files away"
                )
        self._sources, self._cut, self._geometry = sources, cut, geometry
        self._sizes, self._bad = Packs(folder / "sizes"), BadFiles(folder / "bad")

    def fill(self, work: Work) -> None:
        """Looks at this process's share of the files."""
        sources = dict(zip(self._keys, self._sources, strict=True))
        fill(work, self._sizes, self._bad, "sizes", sources, self._measure)

    def _measure(self, source: Source) -> Finish:
        fit = self._cut.fit(media_of(source), self._geometry.multiple)
        size = torch.tensor([fit.frames, fit.height, fit.width])
        return lambda: size

    def open(self, leave_out_bad: bool = False) -> OnTheFly:
        """The samples, once all processes have looked at their share. Bad ones are an error, or left out."""
        found = self._sizes.find()
        kept, remarks = usable(self._sources, [(found, self._keys)], self._bad, leave_out_bad)
        sizes = Shelf(self._sizes.folder, [found[self._keys[index]] for index in kept])
        fits = [Fit(*sizes[number].tolist()) for number in range(len(kept))]
        data = OnTheFly([self._sources[index] for index in kept], fits, self._geometry, self._cut)
        data.remarks = remarks + short_films(data.sources, (fit.frames for fit in fits), self._cut.num_frames)
        return data

    @cached_property
    def _keys(self) -> list[str]:
        keys = MediaKeys(self._cut, lambda cut: Keys("size", self._geometry.multiple, asdict(cut)))
        return [keys.of(source) for source in self._sources]
