"""Encodes frames into latents, and decodes latents into frames.

A latent is the mean of the VAE's posterior, normalised per channel with the statistics in the VAE's config. The VAE
encodes samples one by one: a batch would round differently, and a latent must not depend on the other samples in its
batch, or two ranks would not produce the same cache as one rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.config.values import shown
from unisono.errors import ConfigError
from unisono.recipes.common.fingerprint import of_module
from unisono.recipes.wan.checks import check_frames, check_size
from unisono.recipes.wan.condition.kind import MASK_CHANNELS, channels_of, has_condition_channels
from unisono.recipes.wan.data.media import to_unit
from unisono.recipes.wan.models.parts import count_in, load_part


@dataclass(frozen=True)
class Geometry:
    """The sizes of latents and tokens relative to frames and pixels."""

    channels: int
    temporal_factor: int
    """Frames per latent frame; the exception is the first frame, which has a latent frame of its own."""
    spatial_factor: int
    """Side length, in pixels, of a latent position."""
    patch: int = 2
    """Side length, in latent positions, of a token."""

    @classmethod
    def of(cls, config: Mapping[str, Any], patch: int = 2) -> Geometry:
        """Derives the geometry from a VAE's config."""
        for name in ("temperal_downsample", "dim_mult"):
            if not isinstance(config.get(name, ()), list | tuple):
                raise ConfigError(f"the config of the VAE has {name} {shown(config[name])}; expected a list")
        # Derives the factors from the VAE's layers, because no library checks the scale factors in the config.
        temporal = 2 ** sum(map(bool, config.get("temperal_downsample", (False, True, True))))
        spatial = 2 ** (len(config.get("dim_mult", (1, 2, 4, 4))) - 1) * count_in(config, "patch_size", "VAE", 1)
        for name, factor in (("scale_factor_temporal", temporal), ("scale_factor_spatial", spatial)):
            if (config.get(name) or factor) != factor:
                raise ConfigError(
                    f"the VAE's config has {name} {config[name]}, but its layers make it {factor}; set it to {factor}"
                )
        return cls(count_in(config, "z_dim", "VAE", 16), temporal, spatial, patch)

    @property
    def multiple(self) -> int:
        """The number that must divide height and width in pixels."""
        return self.spatial_factor * self.patch

    def shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Returns the shape of a sample's latent: (channels, frames, height, width)."""
        check_frames(frames)
        check_size(height, width, self.multiple)
        return (
            self.channels,
            1 + (frames - 1) // self.temporal_factor,
            height // self.spatial_factor,
            width // self.spatial_factor,
        )

    def tokens(self, shape: tuple[int, ...]) -> int:
        """Returns the number of transformer tokens for a latent of this shape."""
        return shape[1] * (shape[2] // self.patch) * (shape[3] // self.patch)


class WanVae:
    """A VAE that normalises latents as Wan transformers expect them."""

    def __init__(self, vae: Any) -> None:  # an AutoencoderKLWan, which is untyped
        self.model = vae.eval().requires_grad_(False)
        self.geometry = Geometry.of(vae.config)
        self.statistics = statistics(vae.config)

    @classmethod
    def load(cls, folder: Path) -> WanVae:
        """Loads the VAE from a folder in diffusers' layout, in float32 on the CPU."""
        from diffusers import AutoencoderKLWan

        return cls(load_part(AutoencoderKLWan, folder, torch_dtype=torch.float32))

    def to(self, device: str | torch.device) -> WanVae:
        """Moves the VAE to a device; returns itself."""
        self.model.to(device)
        return self

    def fingerprint(self) -> str:
        """Returns a hash of the VAE."""
        return of_module(self.model)

    def encode_frames(self, frames: Tensor) -> Tensor:
        """Encodes frames uint8 [batch, F, H, W, 3] to latents; training with and without the cache uses this method."""
        return self.encode(torch.stack([to_unit(sample.to(self.model.device)) for sample in frames]))

    @torch.no_grad()
    def encode(self, frames: Tensor) -> Tensor:
        """Encodes frames [batch, 3, F, H, W] in -1..1 to float32 latents [batch, C, f, h, w]."""
        self.geometry.shape(*frames.shape[2:])
        return torch.stack([self._encode(sample) for sample in frames])

    def _encode(self, frames: Tensor) -> Tensor:
        frames = frames.to(self.model.device, self.model.dtype)
        with torch.autocast(frames.device.type, enabled=False):  # the run may use 16-bit autocast
            mean: Tensor = self.model.encode(frames[None]).latent_dist.mode()[0].float()
        return normalised(mean, self.statistics)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents [batch, C, f, h, w] to float32 frames [batch, 3, F, H, W] in -1..1."""
        return torch.stack([self._decode(sample) for sample in latents])

    def _decode(self, latent: Tensor) -> Tensor:
        latent = latent.to(self.model.device, torch.float32)
        mean, std = (part.to(latent.device) for part in self.statistics)
        latent = (latent * std + mean).to(self.model.dtype)
        with torch.autocast(latent.device.type, enabled=False):
            frames: Tensor = self.model.decode(latent[None]).sample[0].float()
        return frames


def check_channels(vae_config: Mapping[str, Any], transformer_config: Mapping[str, Any]) -> None:
    """Raises ConfigError if the transformer does not accept the VAE's latents."""
    latent = count_in(vae_config, "z_dim", "VAE", 16)
    inputs, outputs = channels_of(transformer_config)
    if outputs == latent and (inputs == latent or has_condition_channels(transformer_config)):
        return
    if outputs == latent < inputs:
        raise ConfigError(
            f"the transformer takes {inputs} channels, and this VAE's latents give {latent} to a text-to-video model "
            f"or {2 * latent + MASK_CHANNELS} to an image-to-video model; other models cannot be trained"
        )
    raise ConfigError(
        f"the transformer takes {inputs} channels and outputs {outputs}, but the VAE's latents have {latent}; "
        "use the model's own VAE (Wan 2.1 and A14B: 16 channels, TI2V-5B: 48)"
    )


def normalised(latent: Tensor, statistics: tuple[Tensor, Tensor]) -> Tensor:
    """Normalises a latent [C, f, h, w] with the mean and standard deviation in `statistics`."""
    mean, std = (part.to(latent.device) for part in statistics)
    return (latent - mean) / std


def statistics(config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Reads the mean and the standard deviation of the latents from a VAE's config, each [C, 1, 1, 1]."""
    channels, tensors = int(config["z_dim"]), []
    for name in ("latents_mean", "latents_std"):
        values = config.get(name)
        numbers = isinstance(values, list | tuple) and all(isinstance(value, int | float) for value in values)
        if values and not numbers:
            raise ConfigError(f"the config of the VAE has {name} {shown(values)}; expected {channels} numbers")
        if not values or len(values) != channels:
            raise ConfigError(
                f"the VAE's config has {len(values or ())} numbers in {name} and {channels} channels (z_dim); "
                "latents cannot be normalised without them: use the VAE's own config.json"
            )
        if not all(map(math.isfinite, values)) or (name == "latents_std" and min(values) <= 0):
            raise ConfigError(f"the VAE's config has {name} {values}; expected finite numbers, standard deviations > 0")
        tensors.append(torch.tensor(values, dtype=torch.float32)[:, None, None, None])
    return tensors[0], tensors[1]
