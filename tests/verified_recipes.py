"""Recipes for `tests/test_verify.py`: correct ones, and one for each way in which runs can differ."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import spectral_norm

from unisono import Loss, Recipe

MODELS_BUILT = 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Honest(Recipe):
    defaults = {"batch_size": 3, "num_workers": 0}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1))

    def dataset(self, split: str) -> Any:
        return [(torch.tensor([i / 7, 1 - i / 5]), torch.tensor([float(i % 3)])) for i in range(11)]

    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        x, y = batch
        return Loss((model(x + 0.1 * noise.normal(2)) - y).square().sum(), len(x))


class Mean(Honest):
    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        x, y = batch
        return Loss((model(x) - y).square().mean(), 1)


class Normed(Honest):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


class Spectral(Honest):
    def model(self) -> nn.Module:
        return nn.Sequential(spectral_norm(nn.Linear(2, 8)), nn.Tanh(), nn.Linear(8, 1))


class Crashes(Honest):
    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        raise ValueError("the loss is broken")


class CrashesOnTwoRanks(Honest):
    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        if ranks() == 2 and rank() == 1:
            raise ValueError("the loss is broken on two ranks")
        return super().loss(model, batch, noise)


class HangsUnderDdp(Honest):
    """The first 2-rank run, with one micro-batch, hangs on rank 1."""

    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        if rank() == 1 and len(batch[0]) > 2:
            time.sleep(3600)
        return super().loss(model, batch, noise)


class ExitsSilently(Honest):
    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        if rank() == 1:
            os._exit(0)
        return super().loss(model, batch, noise)


class Unrepeatable(Honest):
    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        x, y = batch
        return Loss((model(x + int.from_bytes(os.urandom(2), "big") / 2**16) - y).square().sum(), len(x))


class OrderOfASet(Honest):
    """Python's hashes of strings differ from process to process."""

    def dataset(self, split: str) -> Any:
        names = {f"sample {i}" for i in range(40)}
        return [(torch.tensor([int(name.split()[1]) / 7, 1.0]), torch.tensor([1.0])) for name in names]


class CountsCalls(Honest):
    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        loss = super().loss(model, batch, noise)
        return Loss(loss.total, loss.count, metrics={"calls": torch.ones(())})


class TellsTheTime(Honest):
    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        loss = super().loss(model, batch, noise)
        return Loss(loss.total, loss.count, metrics={"clock": torch.tensor(time.time() % 1 * loss.count)})


class Empty(Honest):
    def dataset(self, split: str) -> Any:
        return []


class LeavesTraces(Honest):
    """Changes global state of its process, and fails if it finds changes of an earlier run."""

    def model(self) -> nn.Module:
        global MODELS_BUILT
        assert MODELS_BUILT == 0 and "TRACE" not in os.environ and os.getcwd() != "/", "traces of an earlier run"
        assert (
            torch.get_float32_matmul_precision() == "highest" and torch.are_deterministic_algorithms_enabled() is False
        )
        MODELS_BUILT += 1
        os.environ["TRACE"] = "1"
        os.chdir("/")
        return super().model()

    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        torch.set_float32_matmul_precision("medium")
        nn.Dropout.forward = lambda self, x: 0 * x  # type: ignore[method-assign]
        return super().loss(model, batch, noise)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (part(h).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        return x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class LanguageModel(Recipe):
    """Softmax ignores key biases, so their gradient is zero up to rounding."""

    defaults = {"batch_size": 8, "learning_rate": 3e-2, "num_workers": 0}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(32, 32), Attention(32), Attention(32), nn.LayerNorm(32), nn.Linear(32, 32))

    def dataset(self, split: str) -> Any:
        return torch.randint(0, 32, (64, 17), generator=torch.Generator().manual_seed(1))

    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        scores = model(batch[:, :-1])
        return Loss(cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"), batch[:, 1:].numel())


class MeanLanguageModel(LanguageModel):
    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        return Loss(cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()), 1)
