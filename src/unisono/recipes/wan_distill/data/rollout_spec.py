"""Specifies how a teacher generates samples, and draws the random numbers of each sample."""

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
_BEGIN, _LEVELS = -1, -2  # streams of a sample besides those of its noise levels: starting noise, level offset


@dataclass(frozen=True)
class RolloutSpec:
    """Everything besides the prompts that the teacher's samples depend on. Roll-out file names contain its hash."""

    teacher: str
    """Fingerprint of the teacher and its text encoder."""
    how: str
    """The kind of device, and whether the teacher is compiled; both affect rounding."""
    seed: int
    shape: tuple[int, int, int, int]
    """Shape of a latent: channels, frames, height, width."""
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
    """Use the same levels for all samples, as an evaluation does."""
    points: tuple[int, ...] = ()
    """Sampler steps to store."""

    def scheduler(self) -> Any:
        """The sampler's scheduler."""
        return scheduler_of(self.sampler, self.shift, self.steps)

    @cached_property
    def sigmas(self) -> list[float]:
        """The noise levels of the sampler's steps."""
        scheduler = self.scheduler()
        scheduler.set_timesteps(self.steps)
        return [float(sigma) for sigma in scheduler.sigmas[: self.steps]]

    def initial_noise(self, prompt: str, number: int) -> Tensor:
        """The noise that a sample starts from, [C, f, h, w]."""
        return self.noise(torch.tensor([position_of(prompt, number, _BEGIN)]))[0]

    def noise(self, positions: Tensor) -> Tensor:
        """The noise at these positions of the random stream, [batch, C, f, h, w], on the device of `positions`."""
        return self._random(positions).normal(*self.shape, dtype=torch.float32)

    def level(self, prompt: str, number: int, index: int) -> Tensor:
        """Noise level `index` of a sample: the levels are stratified, with one random offset per sample."""
        offset = 0.5
        if not self.fixed:
            offset = self._random(torch.tensor([position_of(prompt, number, _LEVELS)])).uniform(1).item()
        quantile = torch.tensor((index + offset) / self.pairs, dtype=torch.float64)
        return self.spread.quantile(quantile).float()

    def _random(self, positions: Tensor) -> Noise:
        return Noise(key_of(_NOISE, self.seed), positions)


def position_of(prompt: str, number: int, level: int) -> int:
    """The position, in the random stream, of a sample's noise at one of its levels."""
    key = f"{number}\0{level}\0{prompt}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1


def positions_of(samples: Sequence[tuple[str, int]], level: int) -> Tensor:
    """The positions of several samples, [samples]; each sample is a prompt and a number."""
    return torch.tensor([position_of(prompt, number, level) for prompt, number in samples])


def scheduler_of(sampler: str, shift: float, steps: int) -> Any:
    """A diffusers scheduler with levels shift·u / (1 + (shift − 1)·u) at evenly spaced u; the last step ends at 0.

    euler takes plain steps along the velocity. It differs from diffusers' own Euler scheduler, which applies the shift
    twice to its last level, so with few steps the last step does almost nothing.
    """
    from diffusers import UniPCMultistepScheduler

    plain: dict[str, Any] = {"solver_order": 1, "disable_corrector": list(range(steps))} if sampler == "euler" else {}
    return UniPCMultistepScheduler(  # type: ignore[no-untyped-call]
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, **plain
    )
