"""What both Wan recipes need to show what a model draws."""

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


def prompts_in(told: str, setting: str) -> list[str]:
    """The captions that a setting names: separated by |, or the lines of a text file."""
    if not told:
        return []
    if not told.endswith(".txt"):
        return [prompt.strip() for prompt in told.split("|")]
    file = Path(told).expanduser()
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{setting} {told}: more than 1 MiB; expected one caption in each line")
        return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting} {told} cannot be read ({error})") from None


def enlarged(frames: Tensor) -> Tensor:
    """Frames uint8 [F, H, W, 3], the tiny model's large enough to look at."""
    times = max(1, _SMALL // max(frames.shape[1:3]))
    return frames.repeat_interleave(times, 1).repeat_interleave(times, 2)


def decoded(vae: Latents, latents: Tensor) -> Tensor:
    """What latents show; in pieces, where the memory does not suffice for all of it."""
    try:
        return vae.decode(latents)
    except torch.OutOfMemoryError:  # beside weights and optimizer: a run must not end because somebody wants to look
        pass
    torch.cuda.empty_cache()
    vae.vae.enable_tiling()
    return vae.decode(latents)
