"""Previews: parts that both Wan recipes use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unisono.errors import ConfigError

if TYPE_CHECKING:
    from unisono.recipes.wan.models.vae import Latents

_MOST_BYTES = 2**20
_SMALL = 128  # pixels


def prompts_in(value: str, setting: str) -> list[str]:
    """The prompts in a setting: separated by |, or the lines of a text file."""
    if not value:
        return []
    if not value.endswith(".txt"):
        return [prompt.strip() for prompt in value.split("|")]
    file = Path(value).expanduser()
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{setting} {value}: larger than 1 MiB; expected one caption per line")
        return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting} {value} cannot be read ({error})") from None


def enlarged(frames: Tensor) -> Tensor:
    """Frames uint8 [F, H, W, 3], scaled up by a whole factor when they are too small to see."""
    times = max(1, _SMALL // max(frames.shape[1:3]))
    return frames.repeat_interleave(times, 1).repeat_interleave(times, 2)


def decoded(vae: Latents, latents: Tensor) -> Tensor:
    """Decodes latents; in tiles, when the device runs out of memory."""
    try:
        return vae.decode(latents)
    except torch.OutOfMemoryError:  # weights and optimizer state take the memory: a preview must not end the run
        pass
    torch.cuda.empty_cache()
    vae.vae.enable_tiling()
    return vae.decode(latents)
