"""The loss of a micro-batch, and what a held-out sample says at fixed noise levels.

A sample's loss is the mean over its elements, so that a film counts as much as a picture; the engine then takes the
mean over samples. Every random number belongs to a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.engine.recipe import Loss
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.models.islands import compute_type
from unisono.recipes.wan.objective import TIMESTEPS, NoiseLevels, noised, shift_for, velocity

if TYPE_CHECKING:
    from unisono.data.noise import Noise


@dataclass(frozen=True)
class Flow:
    """How a model is trained on latents."""

    levels: NoiseLevels
    low: float
    high: float
    """The noise levels that are trained."""
    shift_by_size: bool = False
    """The shift follows from each sample's size."""
    space: int = 8
    """Pixels of a side for each place of a latent."""
    caption_dropout: float = 0.0
    first_frame: float = 0.0
    """How often a film's first frame is given, instead of learned."""

    def loss(self, model: Experts, latent: Tensor, text: Tensor, empty: Tensor, noise: Noise) -> Loss:
        """The mean squared error of the velocity, summed over samples."""
        chance = noise.uniform(3, dtype=torch.float64)
        sigma = self._levels(latent).within(chance[:, 0], self.low, self.high).to(latent.dtype)
        dropped = chance[:, 1] < self.caption_dropout
        text = torch.where(dropped[:, None, None], empty.to(text), text)
        given = chance[:, 2] < self.first_frame if self.first_frame and latent.shape[2] > 1 else None
        each, metrics = self._errors(model, latent, text, sigma, noise.normal(*latent.shape[1:]), given)
        return Loss(each.sum(), len(each), metrics)

    def held_out(
        self, model: Experts, latent: Tensor, text: Tensor, noise: Noise, num_levels: int
    ) -> Mapping[str, tuple[Tensor, Tensor]]:
        """The loss at evenly spaced quantiles of the noise levels: as curves, and their mean."""
        draws, levels = noise.normal(*latent.shape[1:]), self._levels(latent)
        losses, sigmas, cosines = [], [], []
        for number in range(num_levels):
            share = torch.full((len(latent),), (number + 0.5) / num_levels, device=latent.device)
            sigma = levels.within(share, self.low, self.high).to(latent.dtype)
            each, metrics = self._errors(model, latent, text, sigma, draws, None)
            losses.append(each.double().sum())
            sigmas.append(sigma.double().sum())
            cosines.append(metrics["velocity_cosine"].double())
        count = torch.tensor(float(len(latent)), device=latent.device, dtype=torch.float64)
        found = {"loss": torch.stack(losses).mean(), "velocity_cosine": torch.stack(cosines).mean()}
        curves = {"loss_by_level": torch.stack(losses), "sigma_by_level": torch.stack(sigmas)}
        return {
            **{name: (value, count) for name, value in found.items()},
            **{name: (curve, count.expand(num_levels)) for name, curve in curves.items()},
        }

    def _levels(self, latent: Tensor) -> NoiseLevels:
        if not self.shift_by_size:
            return self.levels
        height, width = latent.shape[3] * self.space, latent.shape[4] * self.space
        return replace(self.levels, shift=shift_for(height * width))

    def _errors(
        self, model: Experts, latent: Tensor, text: Tensor, sigma: Tensor, draws: Tensor, given: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[batch] mean squared error of each sample, and sums of what else is worth knowing."""
        noisy, target, times = noised(latent, draws, sigma), velocity(latent, draws), None
        if self.first_frame and latent.shape[2] > 1:
            given = torch.zeros_like(sigma, dtype=torch.bool) if given is None else given
            noisy, times = with_first_frame(noisy, latent, sigma, given, model.config.patch_size)
        said = model(noisy, sigma, text.to(compute_type(latent)), times)
        said = said.to(target.dtype)  # 32 bit from here on
        if given is None:
            weight = None
            each = (said - target).square().flatten(1).mean(1)
        else:  # a frame that was given teaches nothing, and does not count
            weight = torch.ones_like(target[:, :1])
            weight[:, :, 0] = (~given).to(weight.dtype)[:, None, None, None]
            each = ((said - target).square() * weight).flatten(1).sum(1) / (weight.flatten(1).sum(1) * target.shape[1])
            said, target = said * weight, target * weight
        flat_said, flat_target = said.detach().flatten(1), target.flatten(1)
        metrics = {
            "velocity_cosine": torch.nn.functional.cosine_similarity(flat_said, flat_target).sum(),
            "velocity_norm": flat_said.norm(dim=1).div(flat_target.norm(dim=1)).sum(),
            "sigma": sigma.sum(),
        }
        return each, metrics


def with_first_frame(
    noisy: Tensor, latent: Tensor, sigma: Tensor, given: Tensor, patch: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """The first frame without noise where it is `given`, and [batch, tokens] the time of each token."""
    noisy = noisy.clone()
    noisy[:, :, 0] = torch.where(given[:, None, None, None], latent[:, :, 0], noisy[:, :, 0])
    frames, height, width = (side // part for side, part in zip(latent.shape[2:], patch, strict=True))
    times = (sigma * TIMESTEPS)[:, None, None].repeat(1, frames, height * width)
    times[:, 0] = torch.where(given[:, None], 0.0, times[:, 0])
    return noisy, times.flatten(1)


def collated(items: list[dict[str, Any]]) -> dict[str, Any]:
    """A micro-batch of samples of one shape."""
    batch: dict[str, Any] = {}
    for name in items[0]:
        values = [item[name] for item in items]
        batch[name] = torch.stack(values) if isinstance(values[0], Tensor) else values
    batch.pop("index", None)
    return batch
