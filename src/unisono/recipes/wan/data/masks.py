"""Reads the masks next to samples, which weight the elements of a latent in the loss.

`a.mask.png` or `a.mask.mp4` is the mask of the sample `a`: white counts, black does not, grey counts in part. A mask
gets the same window, crop and scaling as its image or video. Its brightness is then averaged over the pixels of each
latent position and over the frames of each latent frame: the first frame alone, then groups of four frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from unisono.engine.recipe import Work
from unisono.recipes.common.bad_files import BadFiles, BadMedia
from unisono.recipes.common.fingerprint import Keys
from unisono.recipes.common.packs import PackEntry, PackReader, Packs
from unisono.recipes.wan.data import media
from unisono.recipes.wan.data.cache_fill import Finish, fill
from unisono.recipes.wan.data.crop import Crop
from unisono.recipes.wan.data.decode import MediaFacts
from unisono.recipes.wan.data.media import Fit
from unisono.recipes.wan.data.precomputed import read_latent
from unisono.recipes.wan.data.sources import Source
from unisono.recipes.wan.models.vae import Geometry

_FORMAT = 1  # part of every cache key, so entries in another format are never found
_SAME_RATE = 0.01  # largest relative difference between two frame rates that count as equal
_NONE = ""  # the key of a sample without a mask


def read_mask(source: Source, crop: Crop, geometry: Geometry) -> Tensor:
    """Reads the mask of a sample at its latent's resolution, float32 [1, f, h, w] from 0 to 1."""
    assert source.mask is not None
    facts, fit = _sample_of(source, crop, geometry)
    check_same_frames(source.mask, facts, "mask")
    read_as = crop if source.latent is None else Crop(fit.frames)
    mask_fit = Fit(fit.frames if media.probe(source.mask).frames > 1 else 1, fit.height, fit.width)
    grid = on_latent_grid(read_as.read(source.mask, mask_fit), geometry)
    return grid.expand(-1, geometry.shape(fit.frames, fit.height, fit.width)[1], -1, -1).contiguous()


def _sample_of(source: Source, crop: Crop, geometry: Geometry) -> tuple[MediaFacts, Fit]:
    """Returns the facts of the file that a mask must match, and the sample's frame count and size."""
    if source.latent is not None:
        _, frames, height, width = read_latent(source.latent, geometry).shape
        scale, frames = geometry.spatial_factor, 1 + (frames - 1) * geometry.temporal_factor
        return MediaFacts(frames, height * scale, width * scale, 0.0), Fit(frames, height * scale, width * scale)
    assert source.media is not None
    return media.probe(source.media), crop.fit(source.media, geometry.multiple)


def check_same_frames(path: Path, of: MediaFacts, kind: str) -> None:
    """Raises BadMedia if a file next to a sample does not have the sample's size, frame count and frame rate.

    A still image applies to every frame of a video.
    """
    facts = media.probe(path)
    if (facts.height, facts.width) != (of.height, of.width):
        raise BadMedia(
            path,
            f"the {kind} has {facts.height}×{facts.width} pixels, but its sample has {of.height}×{of.width}; make it "
            "the same size",
        )
    if facts.frames == 1:
        return
    if facts.frames != of.frames:
        raise BadMedia(
            path,
            f"the {kind} has {facts.frames} frames, but its sample has {of.frames}; use the same number, or an image",
        )
    if of.fps and abs(facts.fps - of.fps) > _SAME_RATE * of.fps:
        raise BadMedia(
            path,
            f"the {kind} has {facts.fps:.4g} frames per second, but its sample has {of.fps:.4g}; use the same rate",
        )


def on_latent_grid(frames: Tensor, geometry: Geometry) -> Tensor:
    """Averages the brightness of frames uint8 [F, H, W, 3] over each latent position: [1, f, h, w] from 0 to 1."""
    brightness = frames.float().mean(3) / 255
    pooled = functional.avg_pool2d(brightness[None], geometry.spatial_factor)
    first, rest = pooled[:, :1], pooled[:, 1:]
    if rest.shape[1]:
        groups = rest.reshape(1, -1, geometry.temporal_factor, *rest.shape[2:]).mean(2)
        first = torch.cat([first, groups], 1)
    return first


class MaskCache:
    """Caches the masks of a list of samples, some of which may have no mask."""

    def __init__(
        self, folder: Path, sources: Sequence[Source], sample_keys: Sequence[str], crop: Crop, geometry: Geometry
    ) -> None:
        """`sample_keys`: the samples' cache keys, part of the masks' keys because a mask is cropped like its sample."""
        self._sources, self._sample_keys, self._crop, self._geometry = sources, sample_keys, crop, geometry
        self._packs = Packs(folder / "masks", self._is_mask)

    def _is_mask(self, entry: PackEntry) -> bool:
        return len(entry.shape) == 4 and entry.shape[0] == 1 and entry.dtype == torch.float32

    def fill(self, work: Work, bad: BadFiles) -> None:
        """Computes this rank's share of the missing entries."""
        masked = {key: source for key, source in zip(self.keys, self._sources, strict=True) if key != _NONE}
        fill(work, self._packs, bad, "reading masks", masked, self._read)

    def _read(self, source: Source) -> Finish:
        mask = read_mask(source, self._crop, self._geometry)
        if source.mask is not None and not mask.any():
            raise BadMedia(
                source.mask, "is black wherever the sample is used, so the sample would not contribute to the loss"
            )
        return lambda: mask

    def find(self) -> dict[str, PackEntry | None]:
        """Returns all entries by key; None for the key of samples without a mask."""
        return {_NONE: None, **self._packs.find()}

    def open(self, good: Sequence[int]) -> CachedMasks:
        """Opens the masks of the samples with these indices."""
        return CachedMasks(self._packs, [self.keys[index] for index in good])

    @cached_property
    def keys(self) -> list[str]:
        """One key per sample; empty for a sample without a mask."""
        geometry = self._geometry
        keys = Keys("mask", _FORMAT, geometry.temporal_factor, geometry.spatial_factor)
        return [
            _NONE if source.mask is None else keys.of_file(f"{source.name}\0{sample}", source.mask)
            for source, sample in zip(self._sources, self._sample_keys, strict=True)
        ]


class CachedMasks:
    """Masks by the index of their sample."""

    def __init__(self, packs: Packs, keys: Sequence[str]) -> None:
        entries, masked = packs.find(), [index for index, key in enumerate(keys) if key != _NONE]
        self._reader = PackReader(packs.folder, [entries[keys[index]] for index in masked])
        self._number = torch.full((len(keys),), -1, dtype=torch.int32)
        self._number[masked] = torch.arange(len(masked), dtype=torch.int32)

    def mask(self, index: int, shape: tuple[int, ...]) -> Tensor:
        """Returns a sample's mask, [1, f, h, w], or ones if it has none; `shape` is the shape of its latent."""
        number = int(self._number[index])
        return torch.ones(1, *shape[1:]) if number < 0 else self._reader[number]
