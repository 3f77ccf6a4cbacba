"""A recipe with deliberate bugs, for `tests/test_tracebacks.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unisono import Loss, Recipe


class Broken(Exception):
    """The exception that the recipe raises."""

    def __init__(self, code: int) -> None:
        super().__init__(f"broken with code {code}")
        self.code = code


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor, wide: bool) -> torch.Tensor:
        if wide:
            x = torch.cat([x, x], dim=1)
        y: torch.Tensor = self.layers(x)
        return y


class Buggy(Recipe):
    defaults = {"batch_size": 4, "num_workers": 0, "max_steps": 4, "tensorboard": False, "gpus": "0"}

    @dataclass
    class Config:
        bug: str = "shapes"
        """Which bug: shapes, raises, chained, recursion or none."""
        from_call: int = 1
        """Number of the first call of loss() that has the bug."""

    calls = 0

    def model(self) -> nn.Module:
        return Net()

    def dataset(self, split: str) -> Any:
        return [(torch.zeros(2), torch.zeros(1)) for _ in range(16)] if split == "train" else None

    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        self.calls += 1
        x, y = batch
        return Loss((self.score(model, x) - y).square().sum(), len(y))

    def score(self, model: nn.Module, x: torch.Tensor) -> Any:
        bug = self.config.bug if self.calls >= self.config.from_call else "none"
        if bug == "raises":
            raise Broken(7)
        if bug == "chained":
            try:
                return {}["missing"]
            except KeyError as error:
                raise Broken(8) from error
        if bug == "recursion":
            return self.score(model, x)
        return model(x, bug == "shapes")
