"""Specifies how a teacher generates samples, and draws each sample's random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unisono.data.bits import key_of
from unisono.data.noise import Noise
from unisono.recipes.wan.objective import NoiseLevels

_NOISE = 0xD157  # key of the teacher's random stream
_BEGIN, _LEVELS = -1, -2  # a sample's random streams for the starting noise and for the offset of its noise levels


@dataclass(frozen=True)
class RolloutSpec:
    """Everything except the prompts that the teacher's samples depend on; its hash is part of roll-out file names."""

    teacher: str
    """Fingerprint of the teacher and of its text encoder."""
    how: str
    """The kind of device, and whether the teacher is compiled, because both affect rounding."""
    seed: int
    shape: tuple[int, int, int, int]
    """Shape of each latent: channels, frames, height, width."""
    sampler: str
    steps: int
    shift: float
    guidance: tuple[float, float]
    negative: str
    text_tokens: int
    dtype: str
    block: int
    spread: NoiseLevels
    """Distribution of the noise levels."""
    pairs: int = 0
    """Number of noise levels per sample at which the teacher's velocity is stored."""
    fixed: bool = False
    """Whether all samples use the same noise levels, as in an evaluation."""
    points: tuple[int, ...] = ()
    """Sampler steps whose points and velocities are stored."""

    def scheduler(self) -> Any:
        """Creates the sampler's scheduler, with its noise levels set."""
        return scheduler_of(self.sampler, self.shift, self.steps)

    @cached_property
    def sigmas(self) -> list[float]:
        """Returns the noise levels of the sampler's steps."""
        scheduler = self.scheduler()
        scheduler.set_timesteps(self.steps)
        return [float(sigma) for sigma in scheduler.sigmas[: self.steps]]

    def initial_noise(self, prompt: str, number: int) -> Tensor:
        """Returns the noise that a sample starts from, [C, f, h, w]."""
        return self.noise(torch.tensor([position_of(prompt, number, _BEGIN)]))[0]

    def noise(self, positions: Tensor) -> Tensor:
        """Returns the noise [batch, C, f, h, w] at these positions of the random stream, on their device."""
        return self._random(positions).normal(*self.shape, dtype=torch.float32)

    def level(self, prompt: str, number: int, index: int) -> Tensor:
        """Returns noise level `index` of a sample; the levels are stratified, with one random offset per sample."""
        offset = 0.5
        if not self.fixed:
            offset = self._random(torch.tensor([position_of(prompt, number, _LEVELS)])).uniform(1).item()
        quantile = torch.tensor((index + offset) / self.pairs, dtype=torch.float64)
        return self.spread.quantile(quantile).float()

    def _random(self, positions: Tensor) -> Noise:
        return Noise(key_of(_NOISE, self.seed), positions)


def position_of(prompt: str, number: int, level: int) -> int:
    """Returns the position, in the random stream, of a sample's noise at one of its levels."""
    key = f"{number}\0{level}\0{prompt}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1


def positions_of(samples: Sequence[tuple[str, int]], level: int) -> Tensor:
    """Returns the positions of several samples, [samples]; a sample is identified by its prompt and number."""
    return torch.tensor([position_of(prompt, number, level) for prompt, number in samples])


def scheduler_of(sampler: str, shift: float, steps: int) -> Any:
    """Creates a diffusers scheduler with levels shift·u / (1 + (shift − 1)·u) at evenly spaced u, and 0 as the last.

    The sampler euler takes plain steps along the velocity. It is not diffusers' Euler scheduler, which applies the
    shift twice to its last level: with few steps, its last step would do almost nothing.
    """
    from diffusers import UniPCMultistepScheduler

    plain: dict[str, Any] = {"solver_order": 1, "disable_corrector": list(range(steps))} if sampler == "euler" else {}
    return UniPCMultistepScheduler(  # type: ignore[no-untyped-call]
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, **plain
    )
