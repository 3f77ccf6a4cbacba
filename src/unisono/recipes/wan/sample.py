"""Generates latents from noise with diffusers' schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unisono.recipes.wan.condition.inputs import Condition
from unisono.recipes.wan.models.experts import Experts, velocity_of
from unisono.recipes.wan.objective import TIMESTEPS, data_from, noised

Text = tuple[Tensor, Tensor]
"""Embeddings of the captions and of the empty caption, each [batch, length, width]."""


def euler(shift: float) -> Any:
    """Returns a scheduler that takes plain Euler steps along the velocity."""
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
    condition: Condition | None = None,
    stopping: Callable[[], bool] = bool,
    observe: Callable[[int, float, Tensor, Tensor], None] = lambda number, sigma, latents, velocity: None,
) -> Tensor:
    """Generates latents from the noise `latents`, using only the noise levels from `low` to `high`.

    If `low` is above 0, returns the data that the model predicts at the last level. If `high` is below 1 and `like` is
    given, sampling starts from the data `like` with noise added at the first level. With a guidance scale of 1, the
    model's own velocity is used; two experts may have separate guidance scales, the high-noise expert's first.
    `condition` holds the given frames of an image-to-video model; guidance does not drop them. `observe` is called in
    every step.
    """
    scheduler.set_timesteps(steps, device=latents.device)
    times = [time for time in scheduler.timesteps if low <= float(time) / TIMESTEPS <= high]
    if high < 1:
        first = len(scheduler.timesteps) - len(times)
        scheduler.set_begin_index(first)
        if like is not None:
            latents = noised(like, latents, scheduler.sigmas[first].to(latents.device).expand(len(latents)))
    sigma, velocity = 0.0, torch.zeros_like(latents)
    for number, time in enumerate(times):
        sigma = float(time) / TIMESTEPS
        before, velocity = latents, _guided(model, latents, sigma, text, guidance, condition)
        observe(number, sigma, before, velocity)
        with torch.autocast(latents.device.type, enabled=False):  # some schedulers multiply matrices, in float32
            latents = scheduler.step(velocity, time, latents, return_dict=False)[0]
        if stopping():
            break
    if low > 0 and times:
        return data_from(before, velocity, torch.full((len(latents),), sigma, device=latents.device))
    return latents


def _guided(
    model: Experts,
    latents: Tensor,
    sigma: float,
    text: Text,
    guidance: float | tuple[float, float],
    condition: Condition | None,
) -> Tensor:
    transformer = model.at(sigma)
    if isinstance(guidance, tuple):
        guidance = guidance[0 if model.boundary is None or sigma >= model.boundary else 1]
    times = torch.full((len(latents),), sigma * TIMESTEPS, device=latents.device)
    if guidance == 1:
        return _velocity(transformer, latents, times, text[0], condition)
    twice = None if condition is None else condition.twice()
    both = _velocity(transformer, torch.cat([latents, latents]), torch.cat([times, times]), torch.cat(text), twice)
    with_caption, without = both.chunk(2)
    return without + guidance * (with_caption - without)


def _velocity(transformer: Any, latents: Tensor, times: Tensor, text: Tensor, condition: Condition | None) -> Tensor:
    # The text's dtype is the dtype that the model computes in.
    return velocity_of(transformer, latents.to(text.dtype), times, text, condition).to(latents.dtype)
