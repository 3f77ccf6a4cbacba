"""How a teacher draws: all that decides its samples, and the random numbers that belong to each of them."""

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

_NOISE = 0xD157  # names the noise of teachers' samples among all random numbers
_BEGIN, _LEVELS = -1, -2  # what else than a noise level a random number may be for


@dataclass(frozen=True)
class Drawing:
    """All that decides what a teacher draws, besides the prompts."""

    teacher: str
    """Its fingerprint, and that of the text encoder."""
    how: str
    """On what kind of device, and whether compiled: both decide the last bits."""
    seed: int
    shape: tuple[int, int, int, int]
    """Of a latent: channels, frames, height, width."""
    sampler: str
    steps: int
    shift: float
    guidance: tuple[float, float]
    negative: str
    text_tokens: int
    dtype: str
    block: int
    spread: NoiseLevels
    """How noise levels are spread."""
    pairs: int = 0
    """Noise levels at which the teacher is asked about each sample."""
    fixed: bool = False
    """These levels are the same for all samples: an evaluation's."""
    points: tuple[int, ...] = ()
    """Steps of the sampler that are kept."""

    def scheduler(self) -> Any:
        """The sampler."""
        return scheduler_of(self.sampler, self.shift, self.steps)

    @cached_property
    def sigmas(self) -> list[float]:
        """The noise levels of the sampler's steps."""
        scheduler = self.scheduler()
        scheduler.set_timesteps(self.steps)
        return [float(sigma) for sigma in scheduler.sigmas[: self.steps]]

    def begin(self, prompt: str, number: int) -> Tensor:
        """[C, f, h, w] the noise that a sample begins with."""
        return self.noise(torch.tensor([position_of(prompt, number, _BEGIN)]))[0]

    def noise(self, positions: Tensor) -> Tensor:
        """[batch, C, f, h, w] the noise of these positions, computed where they are."""
        return self._random(positions).normal(*self.shape, dtype=torch.float32)

    def level(self, prompt: str, number: int, place: int) -> Tensor:
        """The noise level `place` of a sample: each covers its part of all levels, at a point of the sample's own."""
        within = 0.5
        if not self.fixed:
            within = self._random(torch.tensor([position_of(prompt, number, _LEVELS)])).uniform(1).item()
        share = torch.tensor((place + within) / self.pairs, dtype=torch.float64)
        return self.spread.quantile(share).float()

    def _random(self, positions: Tensor) -> Noise:
        return Noise(key_of(_NOISE, self.seed), positions)


def position_of(prompt: str, number: int, place: int) -> int:
    """Where the random numbers of a sample's noise level are among all."""
    told = f"{number}\0{place}\0{prompt}".encode()
    return int.from_bytes(hashlib.sha256(told).digest()[:8], "little") >> 1


def positions_of(items: Sequence[tuple[str, int]], place: int) -> Tensor:
    """[items] the same for several samples."""
    return torch.tensor([position_of(prompt, number, place) for prompt, number in items])


def scheduler_of(sampler: str, shift: float, steps: int) -> Any:
    """A sampler of diffusers: levels shift·u / (1 + (shift − 1)·u) at evenly spaced u, the last step ends at no noise.

    euler is the plain one, straight steps along the velocity. Not diffusers' own Euler, which shifts its last level
    twice: in few steps that one is nearly lost.
    """
    from diffusers import UniPCMultistepScheduler

    plain: dict[str, Any] = {"solver_order": 1, "disable_corrector": list(range(steps))} if sampler == "euler" else {}
    return UniPCMultistepScheduler(  # type: ignore[no-untyped-call]
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, **plain
    )
