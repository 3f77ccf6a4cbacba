"""The objective that Wan was trained with: a straight path from data to noise, and its velocity.

    x_σ = (1 − σ) x₀ + σ ε          v = ε − x₀          timestep = 1000 σ, not rounded

σ = 0 is data, σ = 1 is noise. Noise levels are drawn by the quantile function of their density, from one uniform
number per sample: so an expert that is responsible for a part of the levels draws inside that part (clamping would
pile most of its samples onto the boundary), and an evaluation can ask for quantiles instead of drawing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

TIMESTEPS = 1000.0
_USUAL_PIXELS = 480 * 832  # where a shift of 3 is usual
_USUAL_SHIFT = 3.0
_BISECTIONS = 60


@dataclass(frozen=True)
class NoiseLevels:
    """How often which noise level is trained."""

    kind: Literal["logit_normal", "uniform", "mode"] = "logit_normal"
    mean: float = 0.0
    """logit_normal: of the logit. Larger means more noise."""
    std: float = 1.0
    mode_scale: float = 1.29
    """mode (Esser et al. 2024, eq. 20): how much the middle is preferred; 0 is uniform."""
    shift: float = 1.0
    """σ becomes shift·σ / (1 + (shift − 1)·σ): larger pictures need more noise to be hidden as well."""

    def quantile(self, share: Tensor) -> Tensor:
        """The noise level below which `share` of all draws lie, in float64."""
        share = share.double()
        if self.kind == "logit_normal":
            sigma = torch.sigmoid(self.mean + self.std * torch.special.ndtri(share))
        elif self.kind == "mode":
            # The paper's u runs from noise to data; 1 − u makes it a quantile function.
            sigma = share - self.mode_scale * (torch.sin(math.pi / 2 * share).square() - share)
        else:
            sigma = share
        return self.shift * sigma / (1 + (self.shift - 1) * sigma)

    def share_below(self, sigma: float) -> float:
        """Which share of all draws lies below `sigma`."""
        return _share_below(self, sigma)

    def within(self, share: Tensor, low: float, high: float) -> Tensor:
        """As `quantile`, of the draws between the levels `low` and `high` only."""
        if low <= 0 and high >= 1:
            return self.quantile(share)
        first, last = self.share_below(low), self.share_below(high)
        return self.quantile(first + share.double() * (last - first)).clamp(low, high)  # rounding only


@cache  # asked for in every step
def _share_below(levels: NoiseLevels, sigma: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if levels.quantile(torch.tensor(middle, dtype=torch.float64)).item() < sigma:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def shift_for(pixels: int) -> float:
    """A shift that grows with the picture's side, as noise that hides as much asks for (Esser et al. 2024, eq. 23)."""
    return max(1.0, _USUAL_SHIFT * math.sqrt(pixels / _USUAL_PIXELS))


def noised(data: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """x_σ of [batch, ...] tensors; `sigma` has one entry per sample."""
    sigma = _as_column(sigma, data)
    return (1 - sigma) * data + sigma * noise


def velocity(data: Tensor, noise: Tensor) -> Tensor:
    """What the model learns to say."""
    return noise - data


def data_from(noisy: Tensor, said: Tensor, sigma: Tensor) -> Tensor:
    """x₀ as the model sees it: x_σ − σ v."""
    return noisy - _as_column(sigma, noisy) * said


def _as_column(sigma: Tensor, like: Tensor) -> Tensor:
    return sigma.to(like.dtype).view(-1, *[1] * (like.dim() - 1))
