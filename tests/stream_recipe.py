"""A recipe whose training data is a stream on each rank, and records which samples enter each step."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from unisono import Loss, Recipe

LENGTHS = (11, 17, 5)


class Numbers(IterableDataset[torch.Tensor]):
    """The numbers of one part, in another order in each epoch, and a random number with each of them."""

    def __init__(self, part: int) -> None:
        self.part, self.at, self.epoch = part, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = self.order(self.epoch)
        while self.at < len(order):
            self.at += 1
            yield torch.tensor([float(order[self.at - 1]), random.random()], dtype=torch.float64)
        self.at, self.epoch = 0, self.epoch + 1

    def order(self, epoch: int) -> list[int]:
        numbers = [1000 * self.part + number for number in range(LENGTHS[self.part])]
        random.Random(epoch).shuffle(numbers)
        return numbers

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class Stateless(IterableDataset[torch.Tensor]):
    """A stream that cannot be resumed."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(2)


class OnStream(Recipe):
    """Fits one number to the numbers of the samples."""

    defaults = {"num_workers": 1, "log_every": 1, "tensorboard": False, "preview_every": -1, "save_every": 3}

    @dataclass
    class Config:
        record: str = ""
        kind: str = "stream"

    def model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def dataset(self, split: str) -> Any:
        if split == "eval":
            return None
        if self.config.kind == "map":
            return torch.zeros(40, 2)
        return Numbers(self.part.number) if self.config.kind == "stream" else Stateless()

    def loss(self, model: nn.Module, batch: torch.Tensor, noise: Any) -> Loss:
        if self.config.record:
            attempt = [int(os.environ["LAUNCH"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))]
            line = {"step": self.clock.step, "attempt": attempt, "ids": batch.tolist(), "at": len(batch)}
            with (Path(self.config.record) / os.environ.get("RANK", "0")).open("a") as file:
                file.write(json.dumps(line) + "\n")
        numbers = batch.to(next(model.parameters()).dtype)
        return Loss((model(numbers[:, :1] / 1000) - numbers[:, 1:]).square().sum(), len(batch))
