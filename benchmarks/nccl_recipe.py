"""Recipes for benchmarks/nccl.py: small texts, an evaluation of any size, and a loss that compares samples."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from cuda_recipe import Text, TinyGpt
from torch import nn

from unisono import Loss, Recipe


class FixedText(Text):
    """Texts of one length, so that every micro-batch has the same shape."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return (3 + index % 11 + (1 + index % 7) * torch.arange(self.length)) % self.vocabulary


class Probe(TinyGpt):
    """Identifies the samples of each step by sums over their tokens, and evaluates a chosen number of samples."""

    defaults = {"learning_rate": 1e-3, "num_workers": 0, "log_every": 1, "tensorboard": False}

    @dataclass
    class Config(TinyGpt.Config):
        width: int = 64
        """Width of the model."""
        depth: int = 2
        """Number of blocks."""
        length: int = 16
        """Longest text, in tokens."""
        dropout: float = 0.0
        """Dropout in the blocks."""
        num_eval: int = 13
        """Number of samples in the evaluation."""
        fixed_length: bool = False
        """Use texts of one length."""
        calls_file: str = ""
        """File in which each rank (its number is appended) counts the calls of loss() in training."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.calls = 0

    def dataset(self, split: str) -> torch.utils.data.Dataset:
        kind = FixedText if self.config.fixed_length else Text
        samples = self.config.num_samples if split == "train" else self.config.num_eval
        return kind(samples, self.config.length, self.config.vocabulary)

    def loss(self, model: nn.Module, batch: torch.Tensor, noise) -> Loss:
        if self.config.calls_file and model.training:
            # A recorded step (--cuda_graph) replays kernels and does not execute this code again.
            self.calls += 1
            Path(f"{self.config.calls_file}.{os.environ.get('RANK', '0')}").write_text(str(self.calls))
        loss = super().loss(model, batch, noise)
        # Two sums over all tokens, which change if a sample is lost, added or counted twice.
        tokens = batch.clamp(min=0)
        places = torch.arange(1, batch.shape[1] + 1, device=batch.device)
        sums = {"print": (tokens * places).sum(), "squares": (tokens.square() * places).sum()}
        # A metric with its own count, so that a mean of the ranks' means would give another result.
        sums["long"] = (((batch >= 0).sum(1) > 0.8 * self.config.length).sum(), len(batch))
        return Loss(loss.total, loss.count, metrics=sums)


class Contrast(Recipe):
    """Learns to match the two halves of a text (its even and odd tokens) among all texts of the global batch."""

    defaults = Probe.defaults

    @dataclass
    class Config(Probe.Config):
        pass

    def model(self) -> nn.Module:
        return TinyGpt(self.config).model()

    def dataset(self, split: str) -> torch.utils.data.Dataset | None:
        return Probe(self.config).dataset(split) if split == "train" else None

    def collate(self, items: list) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=-1)

    def embed(self, model: nn.Module, batch: torch.Tensor, noise) -> dict[str, torch.Tensor]:
        return {"even": self._rows(model, batch[:, ::2]), "odd": self._rows(model, batch[:, 1::2])}

    def couple(self, rows: dict[str, torch.Tensor]) -> Loss:
        scores = 5 * rows["even"] @ rows["odd"].T
        own = torch.arange(len(scores), device=scores.device)
        total = F.cross_entropy(scores, own, reduction="sum") + F.cross_entropy(scores.T, own, reduction="sum")
        return Loss(total, len(scores))

    def _rows(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        real = (tokens >= 0).unsqueeze(-1)
        outputs = model(tokens.clamp(min=0)) * real
        return F.normalize(outputs.sum(1) / real.sum(1), dim=-1)
