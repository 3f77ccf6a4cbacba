"""The flow-matching loss of a micro-batch.

A sample's loss is the mean over its elements, so that a video counts as much as an image; the engine then averages over
samples. Every random number is drawn per sample, so the loss of a sample does not depend on its batch or rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.engine.recipe import Loss
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.objective import TIMESTEPS, NoiseLevels, noised, shift_for, velocity

if TYPE_CHECKING:
    from unisono.data.noise import Noise


@dataclass(frozen=True)
class FlowLoss:
    """The training objective: the distribution of noise levels, caption dropout and first-frame conditions."""

    levels: NoiseLevels
    low: float
    high: float
    """The range of noise levels to train."""
    shift_by_size: bool = False
    """Derive the shift from each sample's size."""
    spatial_factor: int = 8
    """Pixels along a side of one latent position."""
    caption_dropout: float = 0.0
    first_frame: float = 0.0
    """Probability that a video's first frame is a condition instead of a target."""

    def loss(self, model: Experts, latent: Tensor, text: Tensor, empty: Tensor, noise: Noise) -> Loss:
        """The mean squared error of the velocity, summed over samples."""
        chance = noise.uniform(3, dtype=torch.float64)
        sigma = self.levels_for(latent).within(chance[:, 0], self.low, self.high).to(latent.dtype)
        dropped = chance[:, 1] < self.caption_dropout
        text = torch.where(dropped[:, None, None], empty.to(text), text)
        conditioned = chance[:, 2] < self.first_frame if self.first_frame and latent.shape[2] > 1 else None
        errors, metrics = self.errors(model, latent, text, sigma, noise.normal(*latent.shape[1:]), conditioned)
        return Loss(errors.sum(), len(errors), metrics)

    def levels_for(self, latent: Tensor) -> NoiseLevels:
        """The distribution of noise levels for samples of this size."""
        if not self.shift_by_size:
            return self.levels
        height, width = latent.shape[3] * self.spatial_factor, latent.shape[4] * self.spatial_factor
        return replace(self.levels, shift=shift_for(height * width))

    def errors(
        self, model: Experts, latent: Tensor, text: Tensor, sigma: Tensor, draws: Tensor, conditioned: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean squared error of each sample, [batch], and metrics summed over samples.

        `conditioned` [batch] marks the samples whose first frame is a condition.
        """
        noisy, target, times = noised(latent, draws, sigma), velocity(latent, draws), None
        if self.first_frame and latent.shape[2] > 1:
            conditioned = torch.zeros_like(sigma, dtype=torch.bool) if conditioned is None else conditioned
            noisy, times = with_first_frame(noisy, latent, sigma, conditioned, model.config.patch_size)
        predicted = model(noisy, sigma, text, times).to(target.dtype)  # the loss is computed in float32
        if conditioned is None:
            errors = (predicted - target).square().flatten(1).mean(1)
        else:  # the first frame of a conditioned sample does not count in the loss
            weight = torch.ones_like(target[:, :1])
            weight[:, :, 0] = (~conditioned).to(weight.dtype)[:, None, None, None]
            squares = ((predicted - target).square() * weight).flatten(1).sum(1)
            errors = squares / (weight.flatten(1).sum(1) * target.shape[1])
            predicted, target = predicted * weight, target * weight
        flat_predicted, flat_target = predicted.detach().flatten(1), target.flatten(1)
        metrics = {
            "velocity_cosine": F.cosine_similarity(flat_predicted, flat_target).sum(),
            "velocity_norm": flat_predicted.norm(dim=1).div(flat_target.norm(dim=1)).sum(),
            "sigma": sigma.sum(),
        }
        return errors, metrics


def with_first_frame(
    noisy: Tensor, latent: Tensor, sigma: Tensor, conditioned: Tensor, patch: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """Removes the noise from the first frame of `conditioned` samples; also returns timesteps, [batch, tokens]."""
    noisy = noisy.clone()
    noisy[:, :, 0] = torch.where(conditioned[:, None, None, None], latent[:, :, 0], noisy[:, :, 0])
    frames, height, width = (side // part for side, part in zip(latent.shape[2:], patch, strict=True))
    times = (sigma * TIMESTEPS)[:, None, None].repeat(1, frames, height * width)
    times[:, 0] = torch.where(conditioned[:, None], 0.0, times[:, 0])
    return noisy, times.flatten(1)


def collated(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Collates samples of one shape into a micro-batch."""
    batch: dict[str, Any] = {}
    for name in items[0]:
        values = [item[name] for item in items]
        batch[name] = torch.stack(values) if isinstance(values[0], Tensor) else values
    batch.pop("index", None)
    return batch
