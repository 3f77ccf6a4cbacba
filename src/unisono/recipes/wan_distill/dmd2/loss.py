"""The two losses of distribution matching: of the score model, and of the student.

Velocities v give scores: the data that v predicts at x_σ is x̂₀ = x_σ − σ v, and the score is ((1 − σ) x̂₀ − x_σ) / σ².
The score model F learns the velocity of the student's own samples by flow matching. For a sample x of the student with
new noise, x_σ = (1 − σ) x + σ ε, the gradient of the divergence between the student's distribution and the guided
teacher's is proportional to the difference of the two scores, hence to

    g = F̂₀(x_σ) − T̂₀(x_σ)          T̂₀: the data that the guided teacher predicts, F̂₀: that of the score model

divided by the mean of |x − T̂₀| of the sample, so that all noise levels count about the same (DMD, DMD2).
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

_EDGE = 0.02  # fraction of the noise levels at either end that the student's loss does not use
_SMALLEST = 1e-6


@dataclass
class MatchingLoss:
    """The losses of a micro-batch."""

    roles: Roles
    steps: FewSteps
    shape: tuple[int, int, int, int]
    """Shape of a latent."""
    levels: NoiseLevels
    """The distribution of the noise levels at which the scores are learned and compared."""
    empty: Tensor
    """The embedding of the negative prompt, [text length, width]."""

    def of_score(self, model: nn.Module, text: Tensor, noise: Noise, step: int) -> Loss:
        """Flow matching of the score model on samples of the student."""
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
        """Half the mean of g² with the gradient g, for the sample that the student predicts in sampler step `step`."""
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
        # Activates the student's adapters again: blocks that recompute their activations in the backward pass use the
        # adapters that are active at that point.
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
