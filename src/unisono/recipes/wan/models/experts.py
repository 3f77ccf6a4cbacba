"""What is trained: one Wan transformer, or the two experts of Wan 2.2 A14B, each for a part of the noise levels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unisono.recipes.wan.objective import TIMESTEPS

HIGH, LOW = "transformer", "transformer_2"  # as diffusers calls them


class Experts(nn.Module):
    """Transformers by diffusers' names, and which noise levels each of them knows."""

    def __init__(
        self, transformers: Mapping[str, nn.Module], boundary: float | None, *, meets_others: bool = True
    ) -> None:
        """`meets_others`: other ranks may wait for a forward pass of each transformer."""
        super().__init__()
        self._meets_others = meets_others
        for name, transformer in transformers.items():
            self.add_module(name, transformer)
        self.boundary = boundary

    @property
    def both(self) -> bool:
        """Whether both experts are here."""
        return HIGH in self._modules and LOW in self._modules

    @property
    def config(self) -> Any:
        """The configuration of the transformers, which are alike."""
        return next(iter(self.children())).config

    def at(self, sigma: float) -> nn.Module:
        """The transformer for a noise level."""
        if not self.both:
            return next(iter(self.children()))
        assert self.boundary is not None
        return self._modules[HIGH if sigma >= self.boundary else LOW]  # type: ignore[return-value]

    def forward(self, noisy: Tensor, sigma: Tensor, text: Tensor, times: Tensor | None = None) -> Tensor:
        """The velocity at [batch, ...] points of these noise levels; `times` tells tokens of their own time apart."""
        times = sigma * TIMESTEPS if times is None else times
        if not self.both:
            return _velocity(next(iter(self.children())), noisy, times, text)
        assert self.boundary is not None
        # Each sample goes to its expert. One that has none computes a sample for nothing: all ranks must meet in it.
        high = sigma >= self.boundary
        said = torch.zeros_like(noisy)
        for name, mine in ((HIGH, high), (LOW, ~high)):
            rows = mine.nonzero()[:, 0]
            anyway = len(rows) == 0
            if anyway and not self._meets_others:
                continue
            rows = rows.new_zeros(1) if anyway else rows
            part = _velocity(self._modules[name], noisy[rows], times[rows], text[rows])  # type: ignore[arg-type]
            said = said.index_add(0, rows, (part * 0 if anyway else part).to(said.dtype))
        return said


def _velocity(transformer: nn.Module, noisy: Tensor, times: Tensor, text: Tensor) -> Tensor:
    said: Tensor = transformer(noisy, times, text, return_dict=False)[0]
    return said


def parts_to_train(found: Mapping[str, Any], expert: Literal["high", "low", "both"]) -> list[str]:
    """Which of a model's transformers are trained."""
    if LOW not in found:
        return [HIGH]
    return {"high": [HIGH], "low": [LOW], "both": [HIGH, LOW]}[expert]


def range_of(parts: list[str], boundary: float | None, experts: int) -> tuple[float, float]:
    """The noise levels that are trained: all of them, or those of the expert that is."""
    if experts < 2 or len(parts) == 2 or boundary is None:
        return 0.0, 1.0
    return (boundary, 1.0) if parts == [HIGH] else (0.0, boundary)
