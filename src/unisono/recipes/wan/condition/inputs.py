"""Computes the transformer's condition inputs, bitwise equal to those of `WanImageToVideoPipeline`.

The VAE encodes a video of the given frames that is grey everywhere else. The mask marks the given frames. It has four
channels, because a latent frame stands for four frames. The transformer takes the noisy latent, the mask and the latent
of the given frames as input channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.recipes.wan.models.vae import Geometry, WanVae


class Condition(NamedTuple):
    """The transformer's inputs in addition to the noisy latent and the text; one row per sample."""

    channels: Tensor
    """Mask and latent of the given frames, [batch, mask channels + C, f, h, w]."""
    image: Tensor | None = None
    """CLIP embeddings of the given frames, [batch, given frames, tokens, width]."""

    def rows(self, rows: Tensor) -> Condition:
        """Selects the conditions of some samples."""
        return Condition(self.channels[rows], None if self.image is None else self.image[rows])

    def twice(self) -> Condition:
        """Repeats the condition, for a batch that contains each sample twice: with and without its caption."""
        image = None if self.image is None else torch.cat([self.image, self.image])
        return Condition(torch.cat([self.channels, self.channels]), image)

    def to(self, device: torch.device | str) -> Condition:
        """Moves the condition to a device."""
        return Condition(self.channels.to(device), None if self.image is None else self.image.to(device))

    def with_noisy(self, noisy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the transformer's input, with the condition channels appended, and its keyword arguments."""
        channels = torch.cat([noisy, self.channels.to(noisy)], dim=1)
        keywords = {} if self.image is None else {"encoder_hidden_states_image": self.image.flatten(0, 1)}
        return channels, keywords


def condition_shape(geometry: Geometry, latent: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Returns the shape of the condition channels for a latent [C, f, h, w]."""
    channels, frames, height, width = latent
    return geometry.temporal_factor + channels, frames, height, width


def condition_channels(vae: WanVae, given: Tensor, num_frames: int) -> Tensor:
    """Computes the mask and the latent of the given frames, [mask channels + C, f, h, w] in float32.

    `given`: the first frame, or the first and the last, uint8 [1 or 2, H, W, 3].
    """
    pictures = _as_diffusers(given).to(vae.model.device)  # [given, 3, H, W]
    first, *last = pictures.unbind(0)
    grey = first.new_zeros(3, num_frames - len(given), *first.shape[1:])
    video = torch.cat([first[:, None], grey, *(picture[:, None] for picture in last)], dim=1)
    latent = _encoded(vae, video)
    mask = condition_mask(len(given), num_frames, vae.geometry.temporal_factor, latent.shape[2:])
    return torch.cat([mask.to(latent), latent])


def condition_mask(num_given: int, num_frames: int, temporal_factor: int, size: Any) -> Tensor:
    """Returns the mask [temporal_factor, f, h, w]: 1 for the given frames, 0 for the others.

    The first frame has a latent frame of its own, so all mask channels of that latent frame belong to it.
    """
    by_frame = torch.zeros(num_frames)
    by_frame[0] = 1
    if num_given > 1:
        by_frame[-1] = 1
    channels = torch.cat([by_frame[:1].repeat(temporal_factor), by_frame[1:]]).view(-1, temporal_factor).T
    return channels[:, :, None, None].expand(-1, -1, *size).contiguous()


def _as_diffusers(pictures: Tensor) -> Tensor:
    """Converts pictures uint8 [n, H, W, 3] to float32 [n, 3, H, W] in [-1, 1], as diffusers' image processor does.

    The image processor rounds differently from `media.to_unit`.
    """
    return 2.0 * (pictures.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format) / 255.0) - 1.0


@torch.no_grad()
def _encoded(vae: WanVae, video: Tensor) -> Tensor:
    """Encodes a video [3, F, H, W]. Normalises by multiplication, as diffusers' pipeline does, not by division."""
    with torch.autocast(video.device.type, enabled=False):  # the run may use 16-bit autocast
        mean: Tensor = vae.model.encode(video[None].to(vae.model.dtype)).latent_dist.mode()[0].float()
    of_latents, spread = (part.to(mean.device) for part in vae.statistics)
    return (mean - of_latents) * (1.0 / spread)
