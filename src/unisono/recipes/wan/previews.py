"""Functions that both Wan recipes use to make previews."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unisono.errors import ConfigError
from unisono.recipes.wan.data.media import from_unit
from unisono.recipes.wan.data.render import write_video

if TYPE_CHECKING:
    from unisono.recipes.wan.models.vae import WanVae

FPS = 16.0  # frames per second of Wan 2.1
_MOST_BYTES = 2**20
_SMALL = 128  # longest side, in pixels, to which small previews are enlarged


def prompts_in(value: str, setting: str) -> list[str]:
    """Returns the prompts in a setting: separated by |, or the lines of a text file."""
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


def decoded_frames(vae: WanVae, latents: Tensor) -> list[Tensor]:
    """Decodes latents [batch, C, f, h, w] on their device; returns each sample's frames uint8 [F, H, W, 3] on the CPU.

    Moves the VAE back to the CPU afterwards, because training needs the device's memory.
    """
    vae.to(latents.device)
    frames = [from_unit(_decoded(vae, latent[None].float())[0]).cpu() for latent in latents]
    vae.to("cpu")
    return frames


def _decoded(vae: WanVae, latents: Tensor) -> Tensor:
    try:
        return vae.decode(latents)
    except torch.OutOfMemoryError:  # the training state may fill the device, and a preview must not end the run
        pass
    torch.cuda.empty_cache()
    vae.model.enable_tiling()
    return vae.decode(latents)


def enlarged(frames: Tensor) -> Tensor:
    """Enlarges frames uint8 [F, H, W, 3] by an integer factor if they are too small to recognise."""
    factor = max(1, _SMALL // max(frames.shape[1:3]))
    return frames.repeat_interleave(factor, 1).repeat_interleave(factor, 2)


def mp4(frames: Tensor, fps: float = FPS) -> bytes:
    """Encodes frames uint8 [F, H, W, 3] as the bytes of an MP4 file."""
    video = io.BytesIO()
    write_video(frames, video, fps)
    return video.getvalue()
