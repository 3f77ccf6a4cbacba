"""From frames to latents and back: what a Wan transformer sees of a picture or a film.

A latent is the mean of what the VAE says of the frames, brought to zero mean and unit variance channel by channel with
the numbers of the VAE's own config. Samples go through the VAE one by one: a batch would round differently, and a
latent must not depend on the company it was computed in, or the cache of two ranks would not be the cache of one.
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
from unisono.recipes.wan.data.media import to_unit
from unisono.recipes.wan.models.parts import count_in, load_part

_CHUNK = 4  # frames that the VAE takes at a time, after the first one


@dataclass(frozen=True)
class Geometry:
    """How the shape of a latent follows from frames and pixels."""

    channels: int
    time: int
    """Frames that become one, the first one aside, which stays alone."""
    space: int
    """Pixels of a side that become one."""
    patch: int = 2
    """Places of a side that the transformer takes as one token."""

    @classmethod
    def of(cls, config: Mapping[str, Any], patch: int = 2) -> Geometry:
        """The geometry of a VAE, from its config."""
        for name in ("temperal_downsample", "dim_mult"):
            if not isinstance(config.get(name, ()), list | tuple):
                raise ConfigError(f"the config of the VAE has {name} {shown(config[name])}; expected a list")
        # From its layers: the scale factors in the config are for pipelines, and nothing holds them to the truth.
        time = 2 ** sum(map(bool, config.get("temperal_downsample", (False, True, True))))
        space = 2 ** (len(config.get("dim_mult", (1, 2, 4, 4))) - 1) * count_in(config, "patch_size", "VAE", 1)
        for name, factor in (("scale_factor_temporal", time), ("scale_factor_spatial", space)):
            if (config.get(name) or factor) != factor:
                raise ConfigError(
                    f"the VAE's config says {name} {config[name]}, and its layers make it {factor}; set it to {factor}"
                )
        return cls(count_in(config, "z_dim", "VAE", 16), time, space, patch)

    @property
    def multiple(self) -> int:
        """What height and width in pixels must be divisible by."""
        return self.space * self.patch

    def shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """The shape of the latent: (channels, frames, height, width)."""
        if frames < 1 or frames % _CHUNK != 1:
            below = max(1, (frames - 1) // _CHUNK * _CHUNK + 1)
            raise ConfigError(f"{frames} frames: Wan takes 1, 5, 9, 13, … frames; use {below} or {below + _CHUNK}")
        if height < 1 or width < 1 or height % self.multiple or width % self.multiple:
            raise ConfigError(f"{height} × {width} pixels: both sides must be divisible by {self.multiple}")
        return self.channels, 1 + (frames - 1) // self.time, height // self.space, width // self.space

    def tokens(self, shape: tuple[int, ...]) -> int:
        """The tokens that a latent of this shape becomes in the transformer."""
        return shape[1] * (shape[2] // self.patch) * (shape[3] // self.patch)


class Latents:
    """A VAE that gives the latents a Wan transformer is trained on."""

    def __init__(self, vae: Any) -> None:  # an AutoencoderKLWan, whose types are not told
        self.vae = vae.eval().requires_grad_(False)
        self.geometry = Geometry.of(vae.config)
        self.statistics = statistics(vae.config)

    @classmethod
    def load(cls, model_path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Latents:
        """The VAE of a Wan model in diffusers' layout."""
        from diffusers import AutoencoderKLWan

        return cls(load_part(AutoencoderKLWan, model_path, "vae", torch_dtype=dtype)).to(device)

    def to(self, device: str | torch.device) -> Latents:
        """Itself, on a device."""
        self.vae.to(device)
        return self

    def fingerprint(self) -> str:
        """A name for what it computes: another VAE has another one."""
        return of_module(self.vae)

    def encode_pictures(self, frames: Tensor) -> Tensor:
        """uint8 [batch, F, H, W, 3] to latents; the cache and training without it both come this way."""
        return self.encode(torch.stack([to_unit(sample.to(self.vae.device)) for sample in frames]))

    @torch.no_grad()
    def encode(self, frames: Tensor) -> Tensor:
        """[batch, 3, F, H, W] in -1..1 to float32 latents [batch, C, f, h, w]."""
        self.geometry.shape(*frames.shape[2:])
        return torch.stack([self._encode(sample) for sample in frames])

    def _encode(self, frames: Tensor) -> Tensor:
        frames = frames.to(self.vae.device, self.vae.dtype)
        with torch.autocast(frames.device.type, enabled=False):  # a run may compute in 16 bit around us
            mean: Tensor = self.vae.encode(frames[None]).latent_dist.mode()[0].float()
        return normalised(mean, self.statistics)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents [batch, C, f, h, w] to float32 frames [batch, 3, F, H, W] in -1..1."""
        return torch.stack([self._decode(sample) for sample in latents])

    def _decode(self, latent: Tensor) -> Tensor:
        latent = latent.to(self.vae.device, torch.float32)
        mean, std = (part.to(latent.device) for part in self.statistics)
        latent = (latent * std + mean).to(self.vae.dtype)
        with torch.autocast(latent.device.type, enabled=False):
            frames: Tensor = self.vae.decode(latent[None]).sample[0].float()
        return frames


def check_channels(vae_config: Mapping[str, Any], transformer_config: Mapping[str, Any]) -> None:
    """Says (ConfigError) if a transformer is not made for the latents of a VAE."""
    latent = count_in(vae_config, "z_dim", "VAE", 16)
    taken = int(transformer_config.get("in_channels") or 16)
    given = int(transformer_config.get("out_channels") or taken)
    if taken == given == latent:
        return
    if given == latent < taken:
        raise ConfigError(
            f"the transformer takes {taken} channels, {taken - latent} of them for an image it goes on from, and such "
            f"models are not trained here; use a text-to-video model, which takes {latent}"
        )
    raise ConfigError(
        f"the transformer takes {taken} channels and gives {given}, and the VAE's latents have {latent}; "
        "use the VAE that belongs to the model (Wan 2.1 and A14B: 16 channels, TI2V-5B: 48)"
    )


def normalised(latent: Tensor, statistics: tuple[Tensor, Tensor]) -> Tensor:
    """A latent [C, f, h, w] of the VAE with zero mean and unit variance, as far as its statistics know."""
    mean, std = (part.to(latent.device) for part in statistics)
    return (latent - mean) / std


def statistics(config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the latents, each [C, 1, 1, 1]."""
    channels, found = int(config["z_dim"]), []
    for name in ("latents_mean", "latents_std"):
        values = config.get(name)
        numbers = isinstance(values, list | tuple) and all(isinstance(value, int | float) for value in values)
        if values and not numbers:
            raise ConfigError(f"the config of the VAE has {name} {shown(values)}; expected {channels} numbers")
        if not values or len(values) != channels:
            raise ConfigError(
                f"the VAE's config has {len(values or ())} numbers in {name} and {channels} channels (z_dim); "
                "without its statistics latents cannot be normalised: use the config.json that belongs to the VAE"
            )
        if not all(map(math.isfinite, values)) or (name == "latents_std" and min(values) <= 0):
            raise ConfigError(f"the VAE's config has {name} {values}; expected finite numbers, standard deviations > 0")
        found.append(torch.tensor(values, dtype=torch.float32)[:, None, None, None])
    return found[0], found[1]
