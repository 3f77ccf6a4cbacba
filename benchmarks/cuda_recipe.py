"""A small language model on synthetic text of varying length, trained by benchmarks/cuda.py and memory.py."""

import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from unisono import Loss, Recipe


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, -1, 64).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Gpt(nn.Module):
    def __init__(self, vocabulary: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Text(torch.utils.data.Dataset):
    def __init__(self, num_samples: int, length: int, vocabulary: int) -> None:
        self.num_samples, self.length, self.vocabulary = num_samples, length, vocabulary

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(self.length // 2, self.length + 1, (), generator=generator))
        start, stride = torch.randint(1, 50, (2,), generator=generator).tolist()
        return (start + stride * torch.arange(length)) % self.vocabulary


class TinyGpt(Recipe):
    defaults = {"batch_size": 8, "learning_rate": 1e-3, "num_workers": 0}

    @dataclass
    class Config:
        width: int = 128
        """Width of the model."""
        depth: int = 4
        """Number of blocks."""
        length: int = 64
        """Longest text, in tokens."""
        vocabulary: int = 97
        """Vocabulary size."""
        num_samples: int = 512
        """Number of training samples."""
        dropout: float = 0.1
        """Dropout in the blocks."""

    def model(self) -> nn.Module:
        return Gpt(self.config.vocabulary, self.config.width, self.config.depth, self.config.dropout)

    def dataset(self, split: str) -> torch.utils.data.Dataset:
        samples = self.config.num_samples if split == "train" else 64
        return Text(samples, self.config.length, self.config.vocabulary)

    def collate(self, items: list) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=-1)

    def loss(self, model: nn.Module, batch: torch.Tensor, noise) -> Loss:
        targets = batch[:, 1:]
        drop = noise.uniform(batch.shape[1]) < 0.05  # corrupt a few inputs
        inputs = torch.where(drop | (batch < 0), 0, batch)[:, :-1]
        logits = model(inputs).flatten(0, 1)
        total = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="sum")
        return Loss(total=total, count=(targets >= 0).sum())


class NeverWaits(TinyGpt):
    """Raises if the host waits for the GPU between the fifth and the fortieth micro-batch."""

    def __init__(self, config: TinyGpt.Config) -> None:
        super().__init__(config)
        self.calls = 0

    def loss(self, model: nn.Module, batch: torch.Tensor, noise) -> Loss:
        self.calls += 1
        if self.calls in (5, 40):  # only these steps: after them, the run saves, which must synchronize
            torch.cuda.set_sync_debug_mode("error" if self.calls == 5 else "default")
        return super().loss(model, batch, noise)


class Cramped(TinyGpt):
    """Limits the memory of some ranks, and reduces it further after some micro-batches."""

    @dataclass
    class Config(TinyGpt.Config):
        limit_gib: float = 0.0
        """Memory limit of cramped_rank in GiB; 0: no limit."""
        cramped_rank: int = -1
        """The rank with limited memory; -1: all ranks."""
        fixed_length: bool = False
        """Use texts of one length, so that every micro-batch has the same shape."""
        hog_after: int = 0
        """Number of micro-batches after which a rank with limited memory loses another hog_gib; 0: never."""
        hog_gib: float = 0.0
        """Memory lost after hog_after micro-batches, in GiB."""

    def __init__(self, config: "Cramped.Config") -> None:
        super().__init__(config)
        self.cramped = config.cramped_rank in (-1, int(os.environ.get("RANK", "0")))
        self.calls, self.hog = 0, None

    def model(self) -> nn.Module:
        if self.cramped and self.config.limit_gib:
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            torch.cuda.set_per_process_memory_fraction(self.config.limit_gib * 2**30 / total)
        return super().model()

    def dataset(self, split: str) -> torch.utils.data.Dataset | None:
        if split == "eval":
            return None
        text = super().dataset(split)
        if self.config.fixed_length:
            return [(3 + index % 11 + (1 + index % 7) * torch.arange(text.length)) % 97 for index in range(len(text))]
        return text

    def loss(self, model: nn.Module, batch: torch.Tensor, noise) -> Loss:
        self.calls += 1
        if self.cramped and self.calls == self.config.hog_after:
            self.hog = torch.empty(int(self.config.hog_gib * 2**30), dtype=torch.uint8, device=batch.device)
        return super().loss(model, batch, noise)
