"""Small real recipes that the tests train.

`Sentences` has everything that breaks "the same run" in practice: items of different length (so that counts differ from
rank to rank), padding, noise that belongs to samples, augmentation by three random generators, repeated blocks. It can
write down which samples enter a step, and be given samples that spoil one.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, gelu, scaled_dot_product_attention
from torch.utils.data import Dataset

from unisono import Loss, Recipe

VOCABULARY = 13


class SentenceData(Dataset[dict[str, Any]]):
    """Item i: 2 to 12 tokens that depend on i, and a little randomness that depends on when it is read."""

    def __init__(self, num_samples: int, augment: bool, first: int = 0) -> None:
        self.num_samples, self.augment, self.first = num_samples, augment, first

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self.first + index
        tokens = (torch.arange(2 + number * 7 % 11) * (number % 5 + 1) + number) % VOCABULARY
        jitter = torch.zeros(3)
        if self.augment:
            jitter = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])
            tokens[0] = random.randrange(VOCABULARY)
        return {"id": index, "tokens": tokens, "jitter": jitter}


class Block(nn.Module):
    """A transformer block that looks at the tokens a mask allows."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(scaled_dot_product_attention(q, k, v, attn_mask=allowed))
        return x + self.dropout(self.down(gelu(self.up(self.norm2(x)))))


class Reader(nn.Module):
    """Predicts the next token."""

    def __init__(self, width: int, num_blocks: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.jitter = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, real: Tensor, jitter: Tensor, shift: Tensor) -> Tensor:
        x = self.embedding(tokens) + (self.jitter(jitter) + shift)[:, None]
        earlier = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
        for block in self.blocks:
            x = block(x, earlier & real[:, None, :])
        return self.head(self.norm(x))


class Sentences(Recipe):
    """Next-token prediction on sentences of different length."""

    defaults = {"num_workers": 0, "tensorboard": False, "log_every": 1, "learning_rate": 1e-2}

    @dataclass
    class Config:
        num_samples: int = 15
        """Sentences to train on."""
        num_eval: int = 0
        """Sentences to evaluate on; 0 does not evaluate."""
        width: int = 10
        """Width of the model (not a multiple of 3, so that shards are uneven)."""
        num_blocks: int = 2
        """Blocks of the model."""
        dropout: float = 0.0
        """Dropout in the blocks."""
        augment: bool = True
        """Draw random numbers when an item is read."""
        noise: float = 0.3
        """Strength of the noise that is added to the embeddings."""
        record: str | None = None
        """Folder in which each rank writes down the samples that entered its steps."""
        nan_ids: str = ""
        """Samples whose loss is not a number, e.g. 3,5."""
        inf_gradient_ids: str = ""
        """Samples whose loss is finite and whose gradient is not."""
        loud_ids: str = ""
        """Samples whose loss is 10^6 times as large: too much for fp16's first scale."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bad = {kind: _numbers(getattr(config, f"{kind}_ids")) for kind in ("nan", "inf_gradient", "loud")}

    def model(self) -> nn.Module:
        return Reader(self.config.width, self.config.num_blocks, self.config.dropout)

    def dataset(self, split: str) -> SentenceData | None:
        if split == "train":
            return SentenceData(self.config.num_samples, self.config.augment)
        return SentenceData(self.config.num_eval, False, first=1000) if self.config.num_eval else None

    def collate(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        tokens = nn.utils.rnn.pad_sequence([item["tokens"] for item in items], batch_first=True, padding_value=-1)
        return {
            "ids": torch.tensor([item["id"] for item in items]),
            "tokens": tokens,
            "jitter": torch.stack([item["jitter"] for item in items]),
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor], noise: Any) -> Loss:
        scores, targets, ids = self._predict(model, batch, noise)
        if model.training:
            self._note("train", ids)
        total = cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
        if self._has("nan", ids):
            total = total * float("nan")
        if self._has("inf_gradient", ids):  # the root's slope at 0 is infinite
            total = total + torch.sqrt(0 * next(model.parameters()).square().sum())
        if self._has("loud", ids):
            total = total * 1e6
        return Loss(total, (targets != -1).sum(), metrics={"ids": ids.sum(), "squares": ids.square().sum()})

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor], noise: Any) -> Mapping[str, Any]:
        from torchmetrics.classification import MulticlassAccuracy

        if not hasattr(self, "accuracy"):
            self.accuracy = MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-1)
        scores, targets, ids = self._predict(model, batch, noise)
        self._note("eval", ids)
        self.accuracy.update(scores.flatten(0, 1), targets.flatten())
        right = ((scores.argmax(-1) == targets) & (targets != -1)).sum()
        total = cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
        count = (targets != -1).sum()
        return {
            "loss": (total, count),
            "right": (right, count),
            "accuracy": self.accuracy,
            "mean_id": (ids.sum(), len(ids)),
            "mean_square": (ids.square().sum(), len(ids)),
        }

    def _predict(self, model: nn.Module, batch: dict[str, Tensor], noise: Any) -> tuple[Tensor, Tensor, Tensor]:
        tokens = batch["tokens"]
        strength = noise.uniform(1) * self.config.noise
        shift = strength * noise.normal(self.config.width)
        scores = model(tokens.clamp(min=0), tokens != -1, batch["jitter"], shift)
        return scores[:, :-1], tokens[:, 1:], batch["ids"]

    def _has(self, kind: str, ids: Tensor) -> bool:
        return bool(self.bad[kind] & set(ids.tolist()))

    def _note(self, split: str, ids: Tensor) -> None:
        if self.config.record is not None:
            folder = Path(self.config.record)
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"{split}.{os.environ.get('RANK', '0')}").open("a") as file:
                file.write(json.dumps(ids.tolist()) + "\n")


class SentencesByLoss(Sentences):
    """The same, evaluated by its loss as recipes are that do not say how."""

    evaluate = Recipe.evaluate


class CountingReader(Reader):
    """Counts its forward passes and keeps the mean of what it saw, in buffers as batch norm does."""

    def __init__(self, width: int, num_blocks: int, dropout: float) -> None:
        super().__init__(width, num_blocks, dropout)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("latest", torch.zeros(width))
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, tokens: Tensor, real: Tensor, jitter: Tensor, shift: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            latest = self.embedding(tokens).detach().mean((0, 1)).to(self.mean.dtype)
            self.mean.data.lerp_(latest, 0.1)  # unseen by the tensor's version
            self.latest = latest  # another tensor in the same place
        return super().forward(tokens, real, jitter, shift) + self.mean.sum() * 0.01


class SentencesWithBuffers(Sentences):
    """The same with a model whose buffers change in every forward pass."""

    def model(self) -> nn.Module:
        return CountingReader(self.config.width, self.config.num_blocks, self.config.dropout)


class Annealed(SentencesByLoss):
    """A loss that depends on the step, metrics that count other items than tokens, and two groups of weights."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], noise: Any) -> Loss:
        found, ids = super().loss(model, batch, noise), batch["ids"]
        step = {"at": (self.clock.step * len(ids), len(ids)), "done": (self.clock.progress * len(ids), len(ids))}
        even = {"even": (ids[ids % 2 == 0].sum(), (ids % 2 == 0).sum())}
        weight = 1 + 0.5 * self.clock.step + self.clock.progress
        return Loss(found.total * weight, found.count, {**found.metrics, **step, **even})

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        named = list(parameters)
        blocks = [pair for pair in named if pair[0].startswith("blocks")]
        others = [pair for pair in named if not pair[0].startswith("blocks")]
        groups: Any = [{"params": blocks, "name": "blocks"}, {"params": others}]
        return torch.optim.AdamW(groups, lr=1e-2, fused=True)

    def full_precision(self, model: nn.Module) -> list[str]:
        return [name for name, _ in model.named_parameters() if "norm" in name]


class Unused(Sentences):
    """A model with a weight that its loss does not use."""

    def model(self) -> nn.Module:
        model = super().model()
        model.idle = nn.Linear(3, 3)
        return model


class SparseGradient(Sentences):
    """A model that looks its embedding up by a function, with sparse gradients that no module shows."""

    def model(self) -> nn.Module:
        model = super().model()
        table = model.embedding
        table.forward = lambda tokens: embedding(tokens, table.weight, sparse=True)  # type: ignore[method-assign]
        return model


class Points(Dataset[Tensor]):
    """Points in space, of which those at `bad` are not numbers."""

    def __init__(self, num_samples: int, bad: set[int]) -> None:
        self.points = torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(1))
        self.points[sorted(bad)] = torch.nan

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Tensor:
        return self.points[index]


class WithBatchNorm(Sentences):
    """A model with batch norm on points; a point that is not a number spoils the statistics of its whole batch."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def dataset(self, split: str) -> Any:
        return Points(self.config.num_samples, self.bad["nan"]) if split == "train" else Points(5, set())

    def collate(self, items: list[Any]) -> Any:
        return torch.stack(items)

    def loss(self, model: nn.Module, batch: Tensor, noise: Any) -> Loss:  # type: ignore[override]
        return Loss(model(batch).square().sum(), len(batch))

    evaluate = Recipe.evaluate


class FromElsewhere:
    """Weights that are asked for row by row; keeps count of them."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state, self.asked = state, 0

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        part = self.state[name][start:stop].clone()
        self.asked += part.numel()
        return part


class SentencesFromElsewhere(Sentences):
    """The same, with weights that come from elsewhere, some that are never trained and some that are never rounded."""

    def model(self) -> nn.Module:
        sizes = self.config.width, self.config.num_blocks, self.config.dropout
        self.source = FromElsewhere(Reader(*sizes).state_dict())
        with torch.device("meta"):
            model = Reader(*sizes)
        model.embedding.requires_grad_(False)
        model.blocks[0].up.requires_grad_(False)
        return model

    def weights(self, model: nn.Module) -> FromElsewhere:
        return self.source

    def full_precision(self, model: nn.Module) -> list[str]:
        return [name for name, _ in model.named_parameters() if "norm" in name]

    def loss(self, model: nn.Module, batch: dict[str, Tensor], noise: Any) -> Loss:
        if self.config.record:
            Path(self.config.record).mkdir(parents=True, exist_ok=True)
            (Path(self.config.record) / f"asked.{os.environ.get('RANK', '0')}").write_text(str(self.source.asked))
        return super().loss(model, batch, noise)


class TiedReader(Reader):
    """Its head has the weights of its embedding."""

    def __init__(self, width: int, num_blocks: int, dropout: float) -> None:
        super().__init__(width, num_blocks, dropout)
        self.head.weight = self.embedding.weight


class TiedFromElsewhere(SentencesFromElsewhere):
    """A model with a shared weight, all of whose weights come from elsewhere."""

    def model(self) -> nn.Module:
        sizes = self.config.width, self.config.num_blocks, self.config.dropout
        self.source = FromElsewhere(TiedReader(*sizes).state_dict())
        with torch.device("meta"):
            return TiedReader(*sizes)


class TiedHere(TiedFromElsewhere):
    """The same with weights that model() makes itself."""

    def model(self) -> nn.Module:
        return TiedReader(self.config.width, self.config.num_blocks, self.config.dropout)

    def weights(self, model: nn.Module) -> Any:
        return None

    loss = Sentences.loss


class Graph(torch.autograd.Function):
    """Passes a tensor on; lives as long as the graph it is in, and counts how many of them live at once."""

    living = most = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = _Token()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


class _Token:
    def __init__(self) -> None:
        Graph.living += 1

    def __del__(self) -> None:
        Graph.living -= 1


class PairsModel(Reader):
    """One vector of each sentence: the mean over its tokens."""

    def embed(self, tokens: Tensor, real: Tensor, jitter: Tensor, shift: Tensor) -> Tensor:
        found = Graph.apply(self(tokens, real, jitter, shift))
        if torch.is_grad_enabled():
            Graph.most = max(Graph.most, Graph.living)
        mean = (found * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        return nn.functional.normalize(mean, dim=-1)


class CountingPairsModel(PairsModel):
    """Counts its forward passes."""

    def __init__(self, width: int, num_blocks: int, dropout: float) -> None:
        super().__init__(width, num_blocks, dropout)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor, real: Tensor, jitter: Tensor, shift: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        return super().forward(tokens, real, jitter, shift)


class ShapedData(SentenceData):
    """Sentences of one length are batched together."""

    def shape(self, index: int) -> int:
        return len(self[index]["tokens"])


class Pairs(Sentences):
    """Contrastive: the two halves of a sentence find each other among all of the global batch."""

    @dataclass
    class Config(Sentences.Config):
        by_length: bool = False
        """Only sentences of one length are computed together."""
        torn: str = ""
        """Sentences that cannot be read, e.g. 3,5."""

    def model(self) -> nn.Module:
        Graph.most = 0
        return PairsModel(self.config.width, self.config.num_blocks, self.config.dropout)

    def dataset(self, split: str) -> SentenceData | None:
        if split == "eval":
            return super().dataset(split)
        kind = ShapedData if self.config.by_length else SentenceData
        return _Torn(kind(self.config.num_samples, self.config.augment), _numbers(self.config.torn))

    def embed(self, model: nn.Module, batch: dict[str, Tensor], noise: Any) -> Mapping[str, Tensor]:
        if model.training:
            self._note("train", batch["ids"])
        tokens = batch["tokens"]
        shift = noise.uniform(1) * self.config.noise * noise.normal(self.config.width)
        left, right = (
            model.embed(part.clamp(min=0), (part != -1) | (torch.arange(part.shape[1]) == 0), batch["jitter"], shift)
            for part in (tokens[:, ::2], tokens[:, 1::2])
        )
        rows = {"left": left, "right": right, "ids": batch["ids"], "even": batch["ids"] % 2 == 0}
        if self.config.record is not None and model.training:
            (Path(self.config.record) / f"graphs.{os.environ.get('RANK', '0')}").write_text(str(Graph.most))
        return rows

    def couple(self, rows: Mapping[str, Tensor]) -> Loss:
        scores = 5 * rows["left"] @ rows["right"].T
        same = rows["ids"][:, None] == rows["ids"][None]
        scores = scores.masked_fill(same & ~torch.eye(len(same), dtype=torch.bool), -torch.inf)
        right = torch.arange(len(scores))
        total = cross_entropy(scores, right, reduction="sum") + cross_entropy(scores.T, right, reduction="sum")
        return Loss(total, len(scores), {"ids": rows["ids"].sum(), "even": rows["even"].sum()})


class PairsWithBuffers(Pairs):
    """The same with a model whose buffer changes in every forward pass."""

    def model(self) -> nn.Module:
        return CountingPairsModel(self.config.width, self.config.num_blocks, self.config.dropout)


class AnnealedPairs(Pairs):
    """The same with a loss that depends on the step."""

    def couple(self, rows: Mapping[str, Tensor]) -> Loss:
        found = super().couple(rows)
        return Loss(found.total * (1 + self.clock.step), found.count, {"at": (self.clock.step, 1)})


class _Torn(Dataset[dict[str, Any]]):
    def __init__(self, data: SentenceData, torn: set[int]) -> None:
        self.data, self.torn = data, torn
        if isinstance(data, ShapedData):
            self.shape = data.shape

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.torn:
            raise ValueError(f"sentence {index} is torn")
        return self.data[index]


def _numbers(words: str) -> set[int]:
    return {int(word) for word in words.split(",") if word}
