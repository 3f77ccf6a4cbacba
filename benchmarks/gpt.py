"""The model and the data that all variants of a benchmark train: a small GPT on random tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import Dataset


@dataclass(frozen=True)
class Size:
    """Size of the model, and the batch size per rank."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int


SIZES = {
    "tiny": Size(layers=2, width=64, heads=2, vocabulary=256, sequence=64, batch=4),
    "small": Size(layers=4, width=128, heads=4, vocabulary=1024, sequence=128, batch=4),
    "gpt2": Size(layers=12, width=768, heads=12, vocabulary=50304, sequence=1024, batch=8),
    "gpt2-medium": Size(layers=24, width=1024, heads=16, vocabulary=50304, sequence=1024, batch=8),
}


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        # Layers have no biases: the gradient of a key's bias is pure rounding error, which AdamW scales up to full
        # steps, so variants that only round differently would end with different weights.
        self.attention_in = nn.Linear(size.width, 3 * size.width, bias=False)
        self.attention_out = nn.Linear(size.width, size.width, bias=False)
        self.feed_in = nn.Linear(size.width, 4 * size.width, bias=False)
        self.feed_out = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        query, key, value = self.attention_in(self.attention_norm(x)).split(width, dim=2)
        query, key, value = (
            y.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2) for y in (query, key, value)
        )
        y = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(y.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.feed_out(gelu(self.feed_in(self.feed_norm(x))))


class GPT(nn.Module):
    """Predicts the next token; its forward pass returns the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.places = (nn.Embedding(n, size.width) for n in (size.vocabulary, size.sequence))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten(), reduction=reduction)


class RandomTokens(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of `num_samples` sequences from one table of random tokens in memory."""

    def __init__(self, size: Size, num_samples: int) -> None:
        draw = torch.Generator().manual_seed(1)
        self.table = torch.randint(size.vocabulary, (256, size.sequence + 1), generator=draw)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        row = self.table[number % len(self.table)]
        return row[:-1], row[1:]
