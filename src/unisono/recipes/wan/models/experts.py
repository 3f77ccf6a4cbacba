"""The trained model: one Wan transformer, or Wan 2.2 A14B's two experts, each for its own range of noise levels."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unisono.recipes.wan.condition.inputs import Condition
from unisono.recipes.wan.objective import TIMESTEPS

HIGH, LOW = "transformer", "transformer_2"  # diffusers' names


class Experts(nn.Module):
    """One or two transformers by diffusers' names, and the noise level that divides two experts."""

    def __init__(
        self, transformers: Mapping[str, nn.Module], boundary: float | None, *, shared_by_ranks: bool = True
    ) -> None:
        """`shared_by_ranks`: whether a forward pass may contain collectives, in which ranks wait for each other."""
        super().__init__()
        self._shared_by_ranks = shared_by_ranks
        for name, transformer in transformers.items():
            self.add_module(name, transformer)
        self.boundary = boundary

    @property
    def both(self) -> bool:
        """Whether there are two experts."""
        return HIGH in self._modules and LOW in self._modules

    @property
    def config(self) -> Any:
        """The configuration, which both experts share."""
        return next(iter(self.children())).config

    def at(self, sigma: float) -> nn.Module:
        """Returns the transformer for a noise level."""
        if not self.both:
            return next(iter(self.children()))
        assert self.boundary is not None
        return self._modules[HIGH if sigma >= self.boundary else LOW]  # type: ignore[return-value]

    def forward(
        self,
        noisy: Tensor,
        sigma: Tensor,
        text: Tensor,
        times: Tensor | None = None,
        condition: Condition | None = None,
    ) -> Tensor:
        """Predicts the velocity at the points [batch, ...], which have these noise levels.

        `times` are per-token timesteps (TI2V); `condition` holds the given frames of an image-to-video model.
        """
        times = sigma * TIMESTEPS if times is None else times
        if not self.both:
            return velocity_of(next(iter(self.children())), noisy, times, text, condition)
        assert self.boundary is not None
        # Each sample goes to its expert. An expert that gets no samples computes one anyway and discards the result,
        # because under FSDP all ranks must run the same collectives.
        high = sigma >= self.boundary
        velocity = torch.zeros_like(noisy)
        for name, mine in ((HIGH, high), (LOW, ~high)):
            rows = mine.nonzero()[:, 0]
            discarded = len(rows) == 0
            if discarded and not self._shared_by_ranks:
                continue
            rows = rows.new_zeros(1) if discarded else rows
            given = None if condition is None else condition.rows(rows)
            part = velocity_of(self._modules[name], noisy[rows], times[rows], text[rows], given)
            velocity = velocity.index_add(0, rows, (part * 0 if discarded else part).to(velocity.dtype))
        return velocity


def velocity_of(
    transformer: Any, noisy: Tensor, times: Tensor, text: Tensor, condition: Condition | None = None
) -> Tensor:
    """Returns the velocity that one transformer predicts."""
    channels, keywords = (noisy, {}) if condition is None else condition.with_noisy(noisy)
    velocity: Tensor = transformer(channels, times, text, **keywords, return_dict=False)[0]
    return velocity


def parts_to_train(available: Collection[str], expert: Literal["high", "low", "both"]) -> list[str]:
    """Returns the names of the transformers to train."""
    if LOW not in available:
        return [HIGH]
    return {"high": [HIGH], "low": [LOW], "both": [HIGH, LOW]}[expert]


def levels_of(parts: list[str], boundary: float | None) -> tuple[float, float]:
    """Returns the range of noise levels to train: all of them, or those of the only expert that is trained."""
    if boundary is None or len(parts) == 2:
        return 0.0, 1.0
    return (boundary, 1.0) if parts == [HIGH] else (0.0, boundary)
