"""The flow-matching loss of a micro-batch.

A sample's loss is the mean over its elements, so a video counts as much as an image; the engine then averages over
samples. All random numbers are drawn per sample, so the loss of a sample does not depend on its batch or rank.

With masks, each element is weighted, and the engine divides by the sum of the samples' mean weights instead of by the
number of samples: the loss of a step is the weighted mean over the global batch, however it is divided between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.engine.recipe import Loss
from unisono.recipes.wan.condition.inputs import Condition
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
    """Whether to derive the shift from each sample's size."""
    spatial_factor: int = 8
    """Side length, in pixels, of a latent position."""
    caption_dropout: float = 0.0
    first_frame: float = 0.0
    """Probability that a video's first frame is a condition instead of a target."""
    unmasked_weight: float = 0.0
    """Weight of elements where the mask is 0."""

    def loss(
        self,
        model: Experts,
        latent: Tensor,
        text: Tensor,
        empty: Tensor,
        noise: Noise,
        mask: Tensor | None = None,
        condition: Condition | None = None,
    ) -> Loss:
        """Returns the mean squared error of the velocity, summed over samples; for the arguments, see `errors`."""
        chance = noise.uniform(3, dtype=torch.float64)
        sigma = self.levels_for(latent).within(chance[:, 0], self.low, self.high).to(latent.dtype)
        dropped = chance[:, 1] < self.caption_dropout
        text = torch.where(dropped[:, None, None], empty.to(text), text)
        conditioned = chance[:, 2] < self.first_frame if self.first_frame and latent.shape[2] > 1 else None
        draws = noise.normal(*latent.shape[1:])
        errors, weights, metrics = self.errors(model, latent, text, sigma, draws, conditioned, mask, condition)
        if weights is None:
            return Loss(errors.sum(), len(errors), metrics)
        return Loss(errors.sum(), weights.sum(), {name: (value, len(errors)) for name, value in metrics.items()})

    def levels_for(self, latent: Tensor) -> NoiseLevels:
        """Returns the distribution of noise levels for samples of this size."""
        if not self.shift_by_size:
            return self.levels
        height, width = latent.shape[3] * self.spatial_factor, latent.shape[4] * self.spatial_factor
        return replace(self.levels, shift=shift_for(height * width))

    def errors(
        self,
        model: Experts,
        latent: Tensor,
        text: Tensor,
        sigma: Tensor,
        draws: Tensor,
        conditioned: Tensor | None,
        mask: Tensor | None = None,
        condition: Condition | None = None,
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Returns the mean squared error of each sample, [batch], its weight, and metrics summed over samples.

        `conditioned` [batch] marks the samples whose first frame is a condition (TI2V). `mask` [batch, 1, f, h, w]
        weights the elements; the weight of a sample is then the mean weight of its elements, and None without a mask.
        `condition` holds the given frames of an image-to-video model.
        """
        noisy, target, times = noised(latent, draws, sigma), velocity(latent, draws), None
        if self.first_frame and latent.shape[2] > 1:
            conditioned = torch.zeros_like(sigma, dtype=torch.bool) if conditioned is None else conditioned
            noisy, times = with_first_frame(noisy, latent, sigma, conditioned, model.config.patch_size)
        predicted = model(noisy, sigma, text, times, condition).to(target.dtype)  # the loss is computed in float32
        if conditioned is None and mask is None:
            errors, weights = (predicted - target).square().flatten(1).mean(1), None
        else:  # excludes the first frame of conditioned samples from the loss
            counted = torch.ones_like(target[:, :1])
            if conditioned is not None:
                counted[:, :, 0] = (~conditioned).to(counted.dtype)[:, None, None, None]
            weight = (
                counted if mask is None else counted * mask.to(counted).lerp(counted.new_ones(()), self.unmasked_weight)
            )
            num_counted = counted.flatten(1).sum(1)
            squares = ((predicted - target).square() * weight).flatten(1).sum(1)
            errors = squares / (num_counted * target.shape[1])
            weights = None if mask is None else weight.flatten(1).sum(1) / num_counted
            predicted, target = predicted * weight, target * weight
        flat_predicted, flat_target = predicted.detach().flatten(1), target.flatten(1)
        norms = flat_target.norm(dim=1).clamp_min(torch.finfo(target.dtype).tiny)  # a mask may exclude all elements
        metrics = {
            "velocity_cosine": F.cosine_similarity(flat_predicted, flat_target).sum(),
            "velocity_norm": flat_predicted.norm(dim=1).div(norms).sum(),
            "sigma": sigma.sum(),
        }
        return errors, weights, metrics


def with_first_frame(
    noisy: Tensor, latent: Tensor, sigma: Tensor, conditioned: Tensor, patch: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """Removes the noise from the first frame of `conditioned` samples; also returns their timesteps [batch, tokens]."""
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
