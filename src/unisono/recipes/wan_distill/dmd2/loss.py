"""The two losses of distribution matching: one for the score model, one for the student.

A velocity v gives a score: the data that v predicts at x_σ is x̂₀ = x_σ − σ v, and the score is ((1 − σ) x̂₀ − x_σ) / σ².
The score model F learns the velocity of the student's own samples by flow matching. To train the student, new noise is
added to a sample x of the student: x_σ = (1 − σ) x + σ ε. There, the gradient of the divergence between the student's
distribution and the guided teacher's is proportional to the difference between the two scores, and thus to

    g = F̂₀(x_σ) − T̂₀(x_σ)          F̂₀, T̂₀: the data that the score model and the guided teacher predict

g is divided by the sample's mean of |x − T̂₀|, so that all noise levels count about the same (DMD, DMD2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from unisono.engine.recipe import Loss
from unisono.recipes.wan.objective import NoiseLevels, data_from, noised, velocity
from unisono.recipes.wan_distill.dmd2.few_steps import FewSteps
from unisono.recipes.wan_distill.dmd2.roles import Roles

if TYPE_CHECKING:
    from unisono.data.noise import Noise

_EDGE = 0.02  # fraction of the noise levels, at each end, that the student's loss does not use
_SMALLEST = 1e-6


@dataclass
class MatchingLoss:
    """The losses of a micro-batch."""

    roles: Roles
    steps: FewSteps
    shape: tuple[int, int, int, int]
    """Shape of each latent."""
    levels: NoiseLevels
    """The distribution of the noise levels at which the scores are learned and compared."""
    empty: Tensor
    """The embedding of the negative prompt, [text length, width]."""

    def of_score(self, model: nn.Module, text: Tensor, noise: Noise, step: int) -> Loss:
        """Computes the score model's flow-matching loss on samples from the student."""
        student = self.roles.student(model)
        initial = noise.normal(*self.shape)
        with torch.no_grad():
            data = self.steps.predict(student, self.steps.simulate(student, initial, text, step), text, step)
        sigma = self._levels(noise, 0.0, data)
        draws = noise.normal(*self.shape).to(data.dtype)
        predicted = self.roles.score(model)(noised(data, draws, sigma), sigma, text).to(data.dtype)
        errors = (predicted - velocity(data, draws)).square().flatten(1).mean(1)
        return Loss(errors.sum(), len(data))

    def of_student(self, model: nn.Module, text: Tensor, noise: Noise, step: int) -> Loss:
        """Computes half the mean of g², whose gradient is g, for the sample that the student predicts in `step`."""
        student = self.roles.student(model)
        start = self.steps.simulate(student, noise.normal(*self.shape), text, step)
        data = self.steps.predict(student, start, text, step)
        with torch.no_grad():
            sample = data.detach()
            sigma = self._levels(noise, _EDGE, sample)
            noisy = noised(sample, noise.normal(*self.shape).to(sample.dtype), sigma)
            score = self.roles.score(model)(noisy, sigma, text).to(sample.dtype)
            empty = self._negative(text).expand_as(text)
            teacher = self.roles.teacher(model, noisy, sigma, text, empty).to(sample.dtype)
            target = data_from(noisy, teacher, sigma)
            gradient = data_from(noisy, score, sigma) - target
            size = (sample - target).abs().flatten(1).mean(1).clamp(min=_SMALLEST)
            gradient = gradient / size.view(-1, *[1] * (gradient.dim() - 1))
        # Activates the student's adapters again, because blocks that recompute their activations in the backward pass
        # use the adapters that are active then.
        self.roles.student(model)
        # The gradient of half the squared distance to the fixed point (data − g) is g.
        total = (data - (sample - gradient)).square().flatten(1).mean(1).sum() / 2
        cosine = nn.functional.cosine_similarity(score.flatten(1), teacher.flatten(1))
        return Loss(total, len(data), {"score_cosine": cosine.sum()})

    def _levels(self, noise: Noise, edge: float, like: Tensor) -> Tensor:
        chance = noise.uniform(1, dtype=torch.float64)[:, 0]
        return self.levels.quantile(edge + (1 - 2 * edge) * chance).to(like.dtype)

    def _negative(self, like: Tensor) -> Tensor:
        if self.empty.device != like.device or self.empty.dtype != like.dtype:
            self.empty = self.empty.to(like)  # copied once: a copy in every step would stall the GPU
        return self.empty
