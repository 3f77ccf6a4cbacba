"""The objective that Wan was trained with: predict the velocity of a straight path from data to noise.

    x_σ = (1 − σ) x₀ + σ ε          v = ε − x₀          timestep = 1000 σ, not rounded

σ = 0 is data, σ = 1 is noise. Noise levels are drawn by inverse transform sampling: the quantile function of their
density is applied to one uniform number per sample. An expert for a range of levels can therefore draw its levels from
that range (clamping would put most of its samples on the boundary), and an evaluation can use fixed quantiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from unisono.recipes.wan.settings import SigmaSampling

TIMESTEPS = 1000.0
_USUAL_PIXELS = 480 * 832  # the frame size for which a shift of 3 is usual
_USUAL_SHIFT = 3.0
_BISECTIONS = 60


@dataclass(frozen=True)
class NoiseLevels:
    """The distribution of noise levels in training."""

    kind: SigmaSampling = "logit_normal"
    mean: float = 0.0
    """Mean of the logit, for logit_normal. Larger values give more noise."""
    std: float = 1.0
    mode_scale: float = 1.29
    """For mode (Esser et al. 2024, eq. 20): scale of the preference for medium levels; 0 is uniform."""
    shift: float = 1.0
    """σ becomes shift·σ / (1 + (shift − 1)·σ): larger images need more noise to be hidden equally well."""

    def quantile(self, probability: Tensor) -> Tensor:
        """Returns the noise level below which a sample lies with this probability, in float64."""
        probability = probability.double()
        if self.kind == "logit_normal":
            sigma = torch.sigmoid(self.mean + self.std * torch.special.ndtri(probability))
        elif self.kind == "mode":
            # In the paper, u runs from noise to data; a quantile function needs 1 − u.
            sigma = probability - self.mode_scale * (torch.sin(math.pi / 2 * probability).square() - probability)
        else:
            sigma = probability
        return self.shift * sigma / (1 + (self.shift - 1) * sigma)

    def cdf(self, sigma: float) -> float:
        """Returns the probability that a sample's noise level is below `sigma`."""
        return _cdf(self, sigma)

    def within(self, probability: Tensor, low: float, high: float) -> Tensor:
        """Like `quantile`, for the distribution restricted to levels between `low` and `high`."""
        if low <= 0 and high >= 1:
            return self.quantile(probability)
        first, last = self.cdf(low), self.cdf(high)
        return self.quantile(first + probability.double() * (last - first)).clamp(low, high)  # corrects rounding only


@cache  # called with the same arguments in every step
def _cdf(levels: NoiseLevels, sigma: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if levels.quantile(torch.tensor(middle, dtype=torch.float64)).item() < sigma:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def shift_for(pixels: int) -> float:
    """Returns a shift that is proportional to the image's side length (Esser et al. 2024, eq. 23)."""
    return max(1.0, _USUAL_SHIFT * math.sqrt(pixels / _USUAL_PIXELS))


def noised(data: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Returns x_σ of [batch, ...] tensors; `sigma` has one entry per sample."""
    sigma = _as_column(sigma, data)
    return (1 - sigma) * data + sigma * noise


def velocity(data: Tensor, noise: Tensor) -> Tensor:
    """Returns the velocity from data to noise, which the model is trained to predict."""
    return noise - data


def data_from(noisy: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """Returns the data x₀ that a predicted velocity implies: x_σ − σ v."""
    return noisy - _as_column(sigma, noisy) * velocity


def _as_column(sigma: Tensor, like: Tensor) -> Tensor:
    return sigma.to(like.dtype).view(-1, *[1] * (like.dim() - 1))
