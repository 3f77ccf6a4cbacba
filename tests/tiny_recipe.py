"""The smallest recipe that still trains: for tests of everything around the training.

torch is imported only where it is used, so that errors before training are reported in a fraction of a second.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono import Loss, Recipe

HOLD = "TINY_HOLD"
"""Environment variable with the path of a file that contains a number of seconds, by which it delays every micro-batch.

With `30 after 3` in the file, the delay begins at a process's fourth micro-batch, so a test knows at which step the run
waits, however slow the machine is. Changing or deleting the file takes effect at once.
"""


def hold(micro_batches: int) -> None:
    """Waits for as long as the file says, if it exists; `micro_batches` is the number computed so far."""
    began, path = time.monotonic(), os.environ.get(HOLD)
    while path and Path(path).exists():
        with suppress(FileNotFoundError, ValueError):  # the file was just removed, or is being written
            seconds, _, after = Path(path).read_text().partition(" after ")
            if time.monotonic() - began >= float(seconds) or micro_batches < int(after or 0):
                return
        time.sleep(0.02)


class Tiny(Recipe):
    """Fits a line."""

    defaults = {"batch_size": 4, "max_steps": 4, "num_workers": 0, "log_every": 1, "tensorboard": False}

    @dataclass
    class Config:
        num_samples: int = 24
        """Points on the line."""
        flaw: str = ""
        """What is wrong with the loss: number, vector, detached or text."""
        slope: float = 2.0
        """Slope of the line to fit."""

    micro_batches = 0
    """Number of micro-batches that this process has computed."""

    def model(self) -> Any:
        from torch import nn

        return nn.Linear(1, 1)

    def dataset(self, split: str) -> Any:
        if split == "eval":
            return None
        return [(i / 10, self.config.slope * i / 10) for i in range(self.config.num_samples)]

    def loss(self, model: Any, batch: Any, noise: Any) -> Any:
        hold(self.micro_batches)
        self.micro_batches += 1
        weight = next(model.parameters())
        x, y = (column.to(weight.dtype).unsqueeze(1) for column in batch)
        each = (model(x) - y).square()
        flawed = {"number": each.sum(), "text": Loss("a lot", 1)}  # type: ignore[arg-type]
        flawed |= {"vector": Loss(each, len(x)), "detached": Loss(each.sum().detach(), len(x))}
        return flawed.get(self.config.flaw) or Loss(each.sum(), len(x))


class Evaluated(Tiny):
    """A recipe with an evaluation."""

    def dataset(self, split: str) -> Any:
        return super().dataset("train")


class Sibling(Tiny):
    """Another recipe, with its own runs and checkpoints."""


class WithAnotherLoss(Tiny):
    """A recipe whose loss() has the signature of another trainer."""

    def loss(self, model: Any, batch: Any) -> Any:  # type: ignore[override]
        return model(batch)


class WithoutLoss(Recipe):
    """A recipe without loss()."""

    def model(self) -> Any:
        from torch import nn

        return nn.Linear(1, 1)

    def dataset(self, split: str) -> Any:
        return [0.0]
