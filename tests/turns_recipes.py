"""Recipes whose networks are trained in turn, for `tests/test_turns.py`."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from unisono import Group, Loss, Recipe

CYCLE = 6
_EXAMPLES = Path(__file__).parents[1] / "examples/own_model"
LongSequences: Any = runpy.run_path(str(_EXAMPLES / "long_sequences.py"))["LongSequences"]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Network(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, width), nn.Linear(width, outputs)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Networks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(2, 2).requires_grad_(False)
        self.generator, self.critic = Network(3, 8, 2), Network(2, 8, 1)


class Pair(Recipe):
    """A critic and a generator, 5 steps to 1, on the outputs of a frozen layer."""

    defaults = {"batch_size": 6, "num_workers": 0, "log_every": 1, "tensorboard": False, "num_epochs": 30}

    @dataclass
    class Config:
        num_samples: int = 17
        """Number of points."""
        critic_steps: int = CYCLE - 1
        """Steps in a row of the critic."""
        record: str = ""
        """Unused: where other recipes note what they read."""

    def groups(self) -> Sequence[Group]:
        return [
            Group("critic", "critic.", self.config.critic_steps, learning_rate=2e-2, grad_clip=0.1, beta1=0.5),
            Group("generator", ["generator."], warmup_steps=2, lr_schedule="cosine", ema_decay=0.9, optimizer="adam"),
        ]

    def model(self) -> nn.Module:
        return Networks()

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return [*model.generator.blocks, *model.critic.blocks]

    def dataset(self, split: str) -> Any:
        if split == "eval":
            return None
        return [torch.tensor([i / 7 - 1, (i % 5) / 3], dtype=torch.float64) for i in range(self.config.num_samples)]

    def loss(self, model: Any, batch: Any, noise: Any) -> Loss:
        if torch.is_grad_enabled():
            for name, parameter in model.named_parameters():
                assert parameter.requires_grad == name.startswith(f"{self.group}."), (self.group, name)
        real = batch.to(model.base.weight.dtype)
        random = noise.normal(3, dtype=real.dtype)
        if self.group == "generator":
            fake = model.base(model.generator(random))
            return Loss(softplus(-model.critic(fake)).sum(), len(real), {"size": fake.square().sum()})
        with torch.no_grad():
            fake = model.base(model.generator(random))
        of_real, of_fake = model.critic(model.base(real)), model.critic(fake)
        total = softplus(-of_real).sum() + softplus(of_fake).sum()
        return Loss(total, 2 * len(real), {"right": ((of_real > 0).sum() + (of_fake < 0).sum(), 2 * len(real))})


class WithEvaluation(Pair):
    """The same, evaluated by the default: each group's loss."""

    def dataset(self, split: str) -> Any:
        return super().dataset("train") if split == "train" else super().dataset("train")[:5]


class Adapted(nn.Module):
    """A frozen layer with two adapters, of which a pass uses one or none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.student, self.score = (
            nn.Sequential(nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)) for _ in range(2)
        )

    def forward(self, x: Tensor, adapter: str) -> Tensor:
        change = getattr(self, adapter)(x) if adapter else 0
        return x + torch.tanh(self.base(x) + change)


class TwoAdapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted(16) for _ in range(4))

    def forward(self, x: Tensor, adapter: str) -> Tensor:
        for block in self.blocks:
            x = block(x, adapter)
        return x


class Distilled(Pair):
    """A frozen base with two adapters: the student follows the difference between the score and the base."""

    def groups(self) -> Sequence[Group]:
        return [
            Group("score", lambda name: ".score." in name, steps=2, learning_rate=1e-2),
            Group("student", lambda name: ".student." in name, ema_decay=0.5),
        ]

    def model(self) -> nn.Module:
        return TwoAdapters()

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return list(model.blocks)

    def dataset(self, split: str) -> Any:
        return [torch.tensor(i / 7) for i in range(11)] if split == "train" else None

    def loss(self, model: Any, batch: Any, noise: Any) -> Loss:
        random = noise.normal(16)
        if self.group == "student":
            sample = model(random, "student")
            with torch.no_grad():
                difference = model(sample, "score") - model(sample, "")
            return Loss((sample * difference).sum(), len(batch))
        with torch.no_grad():
            sample = model(random, "student")
        return Loss((model(sample + noise.normal(16), "score") - sample).square().sum(), len(batch))


class LongSamples(LongSequences):
    """The example whose samples several ranks share, with two groups of weights."""

    def groups(self) -> Sequence[Group]:
        return [Group("blocks", "blocks."), Group("ends", ("first.", "last."), steps=2)]


class Misdeclared(Pair):
    """Groups that cannot be used."""

    @dataclass
    class Config(Pair.Config):
        flaw: str = ""
        """What is wrong with the groups."""

    def groups(self) -> Any:
        critic, generator = Group("critic", "critic."), Group("generator", "generator.")
        return {
            "overlap": [critic, Group("generator", ["generator.", "critic.last"])],
            "uncovered": [critic],
            "empty": [critic, generator, Group("actor", "actor.")],
            "same name": [critic, Group("critic", "generator.")],
            "name": [critic, Group("a/b", "generator.")],
            "eval": [critic, Group("eval", "generator.")],
            "steps": [critic, Group("generator", "generator.", steps=0)],
            "weights": [critic, Group("generator", 3)],  # type: ignore[arg-type]
            "strings": ["critic.", "generator."],
            "none": None,
            "rate": [critic, Group("generator", "generator.", learning_rate=-1.0)],
            "text": [critic, Group("generator", "generator.", learning_rate="fast")],  # type: ignore[arg-type]
            "schedule": [critic, Group("generator", "generator.", lr_schedule="cosin")],  # type: ignore[arg-type]
            "optimizer": [critic, Group("generator", "generator.", optimizer="adamm")],
            "average": [critic, Group("generator", "generator.", ema_decay=1.0)],
        }.get(self.config.flaw, [critic, generator])


class Compares(Pair):
    def embed(self, model: Any, batch: Any, noise: Any) -> dict[str, Tensor]:
        return {"rows": model.critic(batch)}

    def couple(self, rows: Any) -> Loss:
        return Loss(rows["rows"].sum(), len(rows["rows"]))
