"""Small real recipes that the tests train.

`Sentences` has everything that breaks "the same run" in practice: items of different length (so that counts differ from
rank to rank), padding, noise that belongs to samples, augmentation by three random generators, repeated blocks. It can
record which samples enter a step, and can contain samples that make a step fail.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, gelu, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
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
    """A transformer block with a mask over tokens."""

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
        if self._has("inf_gradient", ids):  # the slope of a square root at 0 is infinite
            total = total + torch.sqrt(0 * next(model.parameters()).square().sum())
        if self._has("loud", ids):
            total = total * 1e6
        return Loss(total, (targets != -1).sum(), metrics={"ids": ids.sum(), "squares": ids.square().sum()})

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor], noise: Any) -> Mapping[str, Any]:
        from torchmetrics.classification import MulticlassAccuracy

        if not hasattr(self, "accuracy"):
            accuracy = MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-1)
            self.accuracy = accuracy.to(batch["ids"].device)
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
    """`Sentences` without evaluate(), so that it is evaluated by its loss."""

    evaluate = Recipe.evaluate


class CountingReader(Reader):
    """Counts its forward passes and averages its inputs in buffers, like batch norm."""

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
            self.mean.data.lerp_(latest, 0.1)  # does not change the tensor's version
            self.latest = latest  # replaces the tensor
        return super().forward(tokens, real, jitter, shift) + self.mean.sum() * 0.01


class SentencesWithBuffers(Sentences):
    """`Sentences` with a model whose buffers change in every forward pass."""

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
    """A model whose functional embedding has sparse gradients, which no module reveals."""

    def model(self) -> nn.Module:
        model = super().model()
        table = model.embedding
        table.forward = lambda tokens: embedding(tokens, table.weight, sparse=True)  # type: ignore[method-assign]
        return model


class PartlyFrozen(Sentences):
    """Trains one layer of each block; its ranks disagree on what is frozen until the engine makes them agree."""

    def model(self) -> nn.Module:
        model = super().model()
        _freeze(model)
        with torch.no_grad():
            model.blocks[0].up.weight += int(os.environ.get("RANK", "0"))
        return model

    def preview(self, model: nn.Module, step: int) -> Mapping[str, Any]:
        tokens = torch.arange(6)[None]
        weight = next(model.parameters())
        scores = model(tokens, tokens >= 0, weight.new_zeros(1, 3), weight.new_zeros(self.config.width))
        return {"scores.txt": str(scores.sum().item())}


def _freeze(model: nn.Module) -> None:
    for block in model.blocks:
        block.requires_grad_(False)
        block.out.requires_grad_(True)


class Points(Dataset[Tensor]):
    """Points in space; those at the indices `bad` are NaN."""

    def __init__(self, num_samples: int, bad: set[int]) -> None:
        self.points = torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(1))
        self.points[sorted(bad)] = torch.nan

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Tensor:
        return self.points[index]


class WithBatchNorm(Sentences):
    """A model with batch norm on points; a NaN point corrupts the statistics of its whole batch."""

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
    """A source of weights that are read row by row; counts the rows."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state, self.asked = state, 0

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        part = self.state[name][start:stop].clone()
        self.asked += part.numel()
        return part


class SentencesFromElsewhere(Sentences):
    """`Sentences` with weights from an external source; some are never trained, and some stay in 32 bit."""

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


class PartlyFrozenFromElsewhere(SentencesFromElsewhere):
    """The same, of which only one layer of each block is trained."""

    def model(self) -> nn.Module:
        model = super().model()
        _freeze(model)
        return model


class WithLora(nn.Module):
    """A frozen linear layer and a trained product of two small matrices."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        weight, rank = torch.Generator().manual_seed(base_layer.in_features), 3
        self.down = nn.Parameter(torch.randn(rank, base_layer.in_features, generator=weight, dtype=torch.float32) / 8)
        self.up = nn.Parameter(torch.randn(base_layer.out_features, rank, generator=weight, dtype=torch.float32) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.down.T @ self.up.T


class SentencesWithLora(Sentences):
    """A LoRA on linear layers of each block; the frozen weights are made here, and so are in checkpoints."""

    from_elsewhere = False

    def model(self) -> nn.Module:
        sizes = self.config.width, self.config.num_blocks, self.config.dropout
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)  # a pretrained model is the same in every precision
        torch.manual_seed(5)
        state = Reader(*sizes).state_dict()
        torch.set_default_dtype(default)
        with torch.device("meta"):
            model = Reader(*sizes).requires_grad_(False)
        if not self.from_elsewhere:
            model.load_state_dict(state, assign=True)
            model.requires_grad_(False)
        names = {name: f"{name}.base_layer" for block in range(sizes[1]) for name in _in_block(block)}
        for name in names:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, WithLora(model.get_submodule(name)))
        self.source = FromElsewhere({_renamed(name, names): tensor for name, tensor in state.items()})
        return model


class SentencesWithLoraFromElsewhere(SentencesWithLora):
    """The same with frozen weights from elsewhere, which checkpoints do not contain."""

    from_elsewhere = True

    def weights(self, model: nn.Module) -> FromElsewhere:
        return self.source

    def full_precision(self, model: nn.Module) -> list[str]:
        return [name for name, _ in model.named_parameters() if "norm" in name]

    def loss(self, model: nn.Module, batch: dict[str, Tensor], noise: Any) -> Loss:
        if self.config.record:
            Path(self.config.record).mkdir(parents=True, exist_ok=True)
            (Path(self.config.record) / f"asked.{os.environ.get('RANK', '0')}").write_text(str(self.source.asked))
        return super().loss(model, batch, noise)


def _in_block(block: int) -> list[str]:
    return [f"blocks.{block}.{layer}" for layer in ("qkv", "up", "down")]


def _renamed(name: str, layers: dict[str, str]) -> str:
    layer, _, leaf = name.rpartition(".")
    return f"{layers.get(layer, layer)}.{leaf}"


class TiedReader(Reader):
    """A model whose head shares the weights of its embedding."""

    def __init__(self, width: int, num_blocks: int, dropout: float) -> None:
        super().__init__(width, num_blocks, dropout)
        self.head.weight = self.embedding.weight


class TiedFromElsewhere(SentencesFromElsewhere):
    """A model with a shared weight whose weights all come from an external source."""

    def model(self) -> nn.Module:
        sizes = self.config.width, self.config.num_blocks, self.config.dropout
        self.source = FromElsewhere(TiedReader(*sizes).state_dict())
        with torch.device("meta"):
            return TiedReader(*sizes)


class TiedHere(TiedFromElsewhere):
    """The same with weights that model() initialises itself."""

    def model(self) -> nn.Module:
        return TiedReader(self.config.width, self.config.num_blocks, self.config.dropout)

    def weights(self, model: nn.Module) -> Any:
        return None

    loss = Sentences.loss


class Graph(torch.autograd.Function):
    """An identity function that lives as long as its graph; counts how many are alive at once."""

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
    """Maps each sentence to one vector: the mean over its tokens."""

    def embed(self, tokens: Tensor, real: Tensor, jitter: Tensor, shift: Tensor) -> Tensor:
        actual = Graph.apply(self(tokens, real, jitter, shift))
        if torch.is_grad_enabled():
            Graph.most = max(Graph.most, Graph.living)
        mean = (actual * real[..., None]).sum(1) / real.sum(1, keepdim=True)
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
    """Sentences with shapes: only sentences of equal length form a batch."""

    def shape(self, index: int) -> int:
        return len(self[index]["tokens"])


class Pairs(Sentences):
    """A contrastive recipe: each half of a sentence must find the other half in the global batch."""

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


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation returns, except embeddings of this width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.elements = width, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor) and self.width not in each.shape]
        self.elements = max([self.elements, *(each.numel() for each in tensors)])
        return result


class PairsByRows(Pairs):
    """The same loss, for a range of rows at a time."""

    @dataclass
    class Config(Pairs.Config):
        room: int = 0
        """If set, rank 1 runs out of memory when it compares more rows at once."""

    def couple_rows(self, rows: Mapping[str, Tensor], start: int, stop: int) -> Loss:
        self._note("anchors", torch.arange(start, stop))
        if 0 < self.config.room < stop - start and os.environ.get("RANK") == "1":
            raise torch.OutOfMemoryError("out of memory")
        with LargestTensor(rows["left"].shape[1]) as seen:
            loss = self._part(rows, start, stop)
        self._note("largest", torch.tensor([seen.elements]))
        return loss

    def _part(self, rows: Mapping[str, Tensor], start: int, stop: int) -> Loss:
        mine = slice(start, stop)
        right = torch.arange(start, stop)
        hidden = (rows["ids"][mine, None] == rows["ids"][None]) & (right[:, None] != torch.arange(len(rows["ids"])))
        there = (5 * rows["left"][mine] @ rows["right"].T).masked_fill(hidden, -torch.inf)
        back = (5 * rows["right"][mine] @ rows["left"].T).masked_fill(hidden, -torch.inf)
        total = cross_entropy(there, right, reduction="sum") + cross_entropy(back, right, reduction="sum")
        return Loss(total, len(there), {"ids": rows["ids"][mine].sum(), "even": rows["even"][mine].sum()})


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


class Layers(Recipe):
    """Three matrices, whose operations can be counted by hand; a rank can be slow in its backward pass."""

    SIZE = 16
    OPERATIONS = 2 * SIZE * SIZE * (3 + 3 + 2)
    """Per sample: three products forward, three for the weights' gradients, two for those of inputs."""

    @dataclass
    class Config:
        slow_rank: int = -1
        """The rank that sleeps in each backward pass."""
        slow_s: float = 0.0
        """Seconds of sleep."""
        formula: float = 0.0
        """Operations per sample that flops() returns, if any."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(self.SIZE, self.SIZE), nn.Tanh()) for _ in range(3)))

    def blocks(self, model: nn.Module) -> Any:
        return list(model.children())

    def dataset(self, split: str) -> Any:
        samples = torch.randn(64, self.SIZE, generator=torch.Generator().manual_seed(0))
        return list(samples) if split == "train" else None

    def flops(self, batch: Any) -> float | None:
        return self.config.formula * len(batch) if self.config.formula else None

    def loss(self, model: nn.Module, batch: Tensor, noise: Any) -> Loss:
        outputs = model(batch)
        if self.config.slow_rank == int(os.environ.get("RANK", "0")):
            outputs = _SlowBackward.apply(outputs, self.config.slow_s)
        return Loss(outputs.square().sum(), len(batch))


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return outputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None
