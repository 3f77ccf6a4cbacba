"""Combines several optimizers, each of which trains some of the weights, into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class CombinedOptimizer(Optimizer):
    """Several optimizers for different weights, with one list of parameter groups and one state."""

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = list(parts)
        self._step_supports_amp_scaling = all(getattr(part, "_step_supports_amp_scaling", False) for part in parts)
        for part in parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Steps all optimizers."""
        for part in self.parts:
            if self._step_supports_amp_scaling:
                part.found_inf, part.grad_scale = self.found_inf, self.grad_scale  # type: ignore[attr-defined]
            part.step()
