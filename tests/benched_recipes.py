"""Recipes that `unisono bench` measures in tests; each makes the hand-written loop do something of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from unisono import Loss, Recipe


class Words(Dataset[dict[str, Tensor]]):
    """Sentences of different lengths, padded."""

    def __init__(self, num: int, jitter: bool) -> None:
        draw = torch.Generator().manual_seed(1)
        self.ids = torch.randint(1, 50, (num, 12), generator=draw)
        self.mask = torch.arange(12)[None] < torch.randint(4, 13, (num, 1), generator=draw)
        self.jitter = jitter

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index]
        if self.jitter:
            ids = torch.where(torch.rand(12) < 0.2, torch.randint(1, 50, (12,)), ids)
        return {"input_ids": ids, "attention_mask": self.mask[index]}


class Sentences(Recipe):
    """Predicts each word from the previous one; the loss counts words."""

    defaults = {"batch_size": 4, "num_workers": 0, "tensorboard": False, "learning_rate": 1e-2, "weight_decay": 0.1}

    @dataclass
    class Config:
        dropout: float = 0.0
        """Probability of dropout."""
        jitter: bool = False
        """Replace words at random."""
        norm: bool = False
        """Use batch norm."""
        num: int = 50
        """Number of sentences."""

    def model(self) -> nn.Module:
        layers = [nn.Embedding(50, 16), nn.Linear(16, 32), nn.ReLU(), nn.Dropout(self.config.dropout)]
        self.has_norm = self.config.norm
        return nn.Sequential(*layers, nn.Linear(32, 50), *([nn.BatchNorm1d(11)] if self.config.norm else []))

    def dataset(self, split: str) -> Words | None:
        return Words(self.config.num, self.config.jitter) if split == "train" else None

    def loss(self, model: nn.Module, batch: dict[str, Tensor], noise: Any) -> Loss:
        scores = model(batch["input_ids"][:, :-1])
        scores = scores + 0.01 * noise.normal(11, 50, dtype=scores.dtype)
        mask = batch["attention_mask"][:, 1:]
        each = nn.functional.cross_entropy(scores.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
        return Loss((each * mask).sum(), mask.sum())


class Other(Sentences):
    """A recipe whose loss is another one each time it is called, so that no second loop can repeat it."""

    calls = 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor], noise: Any) -> Loss:
        loss = super().loss(model, batch, noise)
        Other.calls += 1
        return Loss(loss.total * (1 + 0.01 * Other.calls), loss.count)


class Compared(Sentences):
    """A recipe that compares samples with each other."""

    def embed(self, model: nn.Module, batch: dict[str, Tensor], noise: Any) -> dict[str, Tensor]:
        return {"rows": model(batch["input_ids"][:, :-1]).mean(1)}

    def couple(self, rows: dict[str, Tensor]) -> Loss:
        scores = rows["rows"] @ rows["rows"].T
        return Loss(nn.functional.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"), len(scores))
