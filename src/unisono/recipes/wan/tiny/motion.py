"""Measures whether a generated clip starts with the given frame and moves as its caption says."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.recipes.wan.models.vae import WanVae
from unisono.recipes.wan.tiny.shapes import DIRECTIONS, TRAVEL

_LEAST = TRAVEL[0] / 2  # minimum distance as a fraction of the side: half of the shortest distance in the data
_GREY = 0.25  # difference between colour channels below which a pixel is background


def moves(frames: Tensor, directions: Tensor) -> Tensor:
    """Returns whether each clip's shape moves in the caption's direction, [samples].

    `frames` are [samples, 3, frames, side, side], `directions` are indices of DIRECTIONS. The shape must move further
    in its direction than in any other, and by at least half of the shortest distance in the data.
    """
    ends = frames[:, :, [0, -1]].float()
    colour = (ends.amax(1) - ends.amin(1) - _GREY).clamp(min=0)  # [samples, 2, y, x]
    position = (torch.arange(frames.shape[-1], device=frames.device) + 0.5) / frames.shape[-1]
    total = colour.sum((2, 3)).clamp(min=1e-6)
    centre = torch.stack([(colour.sum(2) * position).sum(2), (colour.sum(3) * position).sum(2)], -1) / total[..., None]
    way = centre[:, 1] - centre[:, 0]  # [samples, (x, y)]
    along = way @ torch.tensor(list(DIRECTIONS.values())).to(way).T  # [samples, directions]
    named = directions.to(way.device)
    return (along.argmax(1) == named) & (along.gather(1, named[:, None])[:, 0] >= _LEAST)


def first_frame_errors(vae: WanVae, frames: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean absolute errors of each clip's first frame and of the VAE's reconstruction, [samples] each.

    Both are compared with the given frame; pixel values range from -1 to 1. `given` holds the given frames, uint8
    [samples, 1 or 2, H, W, 3].
    """
    expected = given[:, 0].permute(0, 3, 1, 2).float().cpu() / 127.5 - 1
    through_vae = vae.decode(vae.encode(expected[:, :, None]))
    generated = frames[:, :, 0].cpu()
    return tuple((each - expected).abs().flatten(1).mean(1) for each in (generated, through_vae[:, :, 0].cpu()))  # type: ignore[return-value]
