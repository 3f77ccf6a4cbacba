"""The student's sampler: a few Euler steps, as the exported scheduler takes them.

In training, the student samples from noise with its own current weights up to a random step (backward simulation), so
that it learns from the inputs that it will see when it samples. At that step, the sample that it predicts is trained.
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

_EXIT = 0xE817  # key of the random steps


@dataclass(frozen=True)
class FewSteps:
    """Noise levels of the student's steps."""

    times: Sequence[float]
    """The noise level that the model gets in each step. diffusers' scheduler rounds it to a whole timestep."""
    sigmas: Sequence[float]
    """The noise level of the sample before each step, and 0 after the last one."""

    @staticmethod
    def of(scheduler: Any, steps: int) -> FewSteps:
        """The steps that a diffusers scheduler takes along a velocity."""
        scheduler.set_timesteps(steps)
        times = [float(time) / TIMESTEPS for time in scheduler.timesteps]
        return FewSteps(times, [*(float(sigma) for sigma in scheduler.sigmas[:steps]), 0.0])

    def exit_at(self, seed: int, step: int) -> int:
        """The step of the sampler that training step `step` trains, the same for all samples and on all ranks."""
        bits = int(random_bits(key_of(_EXIT, seed), torch.tensor([step]))[0])
        return (bits & (2**62 - 1)) % len(self.times)

    @torch.no_grad()
    def simulate(self, student: Experts, noise: Tensor, text: Tensor, stop: int) -> Tensor:
        """The student's input in step `stop`: takes the steps before it, from the noise `noise`."""
        latents = noise
        for step in range(stop):
            time = self.times[step]
            # All samples have the same noise level, so one expert is enough.
            times = torch.full((len(latents),), time * TIMESTEPS, device=latents.device)
            velocity = velocity_of(student.at(time), latents, times, text).to(latents.dtype)
            latents = latents + (self.sigmas[step + 1] - self.sigmas[step]) * velocity
        return latents

    def predict(self, student: Experts, latents: Tensor, text: Tensor, step: int) -> Tensor:
        """The sample (noise level 0) that the student predicts in a step."""
        times = torch.full((len(latents),), self.times[step], device=latents.device, dtype=latents.dtype)
        velocity: Tensor = student(latents, times, text)
        return latents - self.sigmas[step] * velocity.to(latents.dtype)
