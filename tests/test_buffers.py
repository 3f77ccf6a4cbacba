"""A skipped step does not change buffers, and ranks share buffers of any shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import unisono
from ranks import run_ranks
from tiny_recipe import Tiny
from unisono import Loss
from unisono.parallel.buffers import BufferBackup


def test_a_constant_buffer_is_recognised_even_if_forward_passes_are_repeated() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.arange(4.0))
    model.register_buffer("count", torch.zeros(()))
    backup = BufferBackup(model)
    for step in range(6):
        backup.save()
        assert backup.num_copied == (2 if step < 3 else 1)
        for _ in range(2):  # two forward passes, as in a coupled loss: one for the rows, one for the gradient
            backup.rewind()
            model.count.add_(1)
        backup.find_constants()
        backup.undo_where(torch.zeros(()))
        assert model.count == step + 1


def test_undoing_a_step_writes_only_to_the_buffers() -> None:
    batch = torch.ones(3)
    model = nn.Module()
    model.register_buffer("latest", torch.zeros(3))
    backup = BufferBackup(model)
    backup.save()
    model.latest = batch.view(3)
    backup._undo_on_device(torch.tensor(True))
    assert torch.equal(model.latest, torch.zeros(3)) and torch.equal(batch, torch.ones(3))


class Grows(nn.Module):
    """A table that grows with the longest input so far, as caches of rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("cache", torch.ones(1), persistent=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        longest = int(x.detach().abs().max() * 1000) + 2
        if len(self.cache) < longest:
            self.cache = torch.ones(longest)
        self.seen += 1
        return self.linear(x)


class Caching(Tiny):
    def model(self) -> nn.Module:
        return Grows()

    def dataset(self, split: str) -> Any:
        return [torch.tensor([float(i)]) for i in range(16)]

    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        return Loss(model(batch).square().sum(), len(batch))


def train_with_a_cache(folder: str) -> list[float]:
    result = unisono.train(Caching, output_dir=folder, strategy="ddp", max_steps=4, batch_size=2, eval_every=2)
    return [float(result.step), result.last["eval/loss"]]


def test_a_buffer_whose_length_differs_between_ranks_blocks_no_rank(tmp_path: Path) -> None:
    first, second = run_ranks("train_with_a_cache", __file__, 2, {"folder": str(tmp_path / "run")}, timeout_s=60.0)
    assert first == second and first[0] == 4
