"""The student's sampler: the same few Euler steps that the exported scheduler takes.

In training, the student starts from noise and takes the steps before a random step with its current weights (backward
simulation). It therefore learns from the inputs that it will see when it generates samples. The loss applies to the
sample that it predicts in the random step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.data.bits import key_of, random_bits
from unisono.recipes.wan.models.experts import Experts, velocity_of
from unisono.recipes.wan.objective import TIMESTEPS

_EXIT = 0xE817  # key of the random numbers that choose the step to train


@dataclass(frozen=True)
class FewSteps:
    """The noise levels of the student's sampler steps."""

    times: Sequence[float]
    """The noise level that the model gets in each step; diffusers' scheduler rounds it to a whole timestep."""
    sigmas: Sequence[float]
    """The exact noise level of the sample before each step, and 0 after the last step."""

    @staticmethod
    def of(scheduler: Any, steps: int) -> FewSteps:
        """Returns the steps that a diffusers scheduler takes along a velocity."""
        scheduler.set_timesteps(steps)
        times = [float(time) / TIMESTEPS for time in scheduler.timesteps]
        return FewSteps(times, [*(float(sigma) for sigma in scheduler.sigmas[:steps]), 0.0])

    def exit_at(self, seed: int, step: int) -> int:
        """Returns the sampler step to train in training step `step`; the same for all samples and on all ranks."""
        bits = int(random_bits(key_of(_EXIT, seed), torch.tensor([step]))[0])
        return (bits & (2**62 - 1)) % len(self.times)

    @torch.no_grad()
    def simulate(self, student: Experts, noise: Tensor, text: Tensor, stop: int) -> Tensor:
        """Returns the student's input in step `stop`: starts from `noise` and takes the steps before `stop`."""
        latents = noise
        for step in range(stop):
            time = self.times[step]
            # All samples have the same noise level, so only one expert is needed.
            times = torch.full((len(latents),), time * TIMESTEPS, device=latents.device)
            velocity = velocity_of(student.at(time), latents, times, text).to(latents.dtype)
            latents = latents + (self.sigmas[step + 1] - self.sigmas[step]) * velocity
        return latents

    def predict(self, student: Experts, latents: Tensor, text: Tensor, step: int) -> Tensor:
        """Returns the sample (noise level 0) that the student predicts in a step."""
        times = torch.full((len(latents),), self.times[step], device=latents.device, dtype=latents.dtype)
        velocity: Tensor = student(latents, times, text)
        return latents - self.sigmas[step] * velocity.to(latents.dtype)
