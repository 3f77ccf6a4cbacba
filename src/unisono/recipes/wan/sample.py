"""From noise to latents with a model as it is, by diffusers' own schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.objective import TIMESTEPS, data_from, noised

Text = tuple[Tensor, Tensor]
"""[batch, length, width] rows of the captions, and of no caption."""


def euler(shift: float) -> Any:
    """The plain scheduler: straight steps along the velocity."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=shift)  # type: ignore[no-untyped-call]


@torch.no_grad()
def sample(
    model: Experts,
    latents: Tensor,
    text: Text,
    scheduler: Any,
    *,
    steps: int,
    guidance: float | tuple[float, float],
    low: float = 0.0,
    high: float = 1.0,
    like: Tensor | None = None,
    stopping: Callable[[], bool] = bool,
    observe: Callable[[int, float, Tensor, Tensor], None] = lambda number, sigma, latents, velocity: None,
) -> Tensor:
    """Latents at no noise, from `latents` at the first noise level; what lies outside of low..high is left out.

    A model that knows only the levels above `low` says at the end where it was going. One that knows only those below
    `high` begins with `like`, where that is given: `latents` are noise then, and hide it as far as the first level
    asks for. Guidance 1 is the model itself; more goes further from what it would draw without a caption; two experts
    may have one each, the high-noise one first. `observe` sees every step.
    """
    scheduler.set_timesteps(steps, device=latents.device)
    times = [time for time in scheduler.timesteps if low <= float(time) / TIMESTEPS <= high]
    if high < 1:
        first = len(scheduler.timesteps) - len(times)
        scheduler.set_begin_index(first)
        if like is not None:
            latents = noised(like, latents, scheduler.sigmas[first].to(latents.device).expand(len(latents)))
    sigma, said = 0.0, torch.zeros_like(latents)
    for number, time in enumerate(times):
        sigma = float(time) / TIMESTEPS
        before, said = latents, _guided(model, latents, sigma, text, guidance)
        observe(number, sigma, before, said)
        with torch.autocast(latents.device.type, enabled=False):  # some schedulers multiply matrices: in 32 bit
            latents = scheduler.step(said, time, latents, return_dict=False)[0]
        if stopping():
            break
    if low > 0 and times:
        return data_from(before, said, torch.full((len(latents),), sigma, device=latents.device))
    return latents


def _guided(model: Experts, latents: Tensor, sigma: float, text: Text, guidance: float | tuple[float, float]) -> Tensor:
    transformer = model.at(sigma)
    if isinstance(guidance, tuple):
        guidance = guidance[0 if model.boundary is None or sigma >= model.boundary else 1]
    times = torch.full((len(latents),), sigma * TIMESTEPS, device=latents.device)
    if guidance == 1:
        return _said(transformer, latents, times, text[0])
    said = _said(transformer, torch.cat([latents, latents]), torch.cat([times, times]), torch.cat(text))
    with_caption, without = said.chunk(2)
    return without + guidance * (with_caption - without)


def _said(transformer: Any, latents: Tensor, times: Tensor, text: Tensor) -> Tensor:
    # In the type of the text, which is the one that the model computes in.
    said: Tensor = transformer(latents.to(text.dtype), times, text, return_dict=False)[0]
    return said.to(latents.dtype)
