"""A transformer whose samples may be too long for one GPU, so several ranks process one sample together.

    unisono train examples/own_model/long_sequences.py:LongSequences --nproc 4 --context_parallel 2
    unisono verify examples/own_model/long_sequences.py:LongSequences --ranks 1,2,4 --context_parallel 2

The model learns to smooth a long noisy signal. Every position attends to all others.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono import Loss, Recipe


class Block(nn.Module):
    """Attention over all tokens, then a network for each token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.to_query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.each = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, tokens: Any) -> Tensor:  # x is [batch, this rank's tokens, width]
        parts = self.to_query_key_value(self.norms[0](x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)) for part in parts)
        x = x + self.out(tokens.attention(query, key, value).flatten(2))  # the only operation that needs other tokens
        return x + self.each(self.norms[1](x))


class Smoother(nn.Module):
    """Predicts the signal without its noise."""

    def __init__(self, context: Any, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.context = context
        self.first, self.last = nn.Linear(2, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, signal: Tensor) -> Tensor:  # [batch, length]
        tokens = self.context.tokens(signal.shape[1])  # how this sample is divided between ranks
        position = torch.linspace(-1, 1, signal.shape[1], dtype=signal.dtype, device=signal.device).expand_as(signal)
        x = self.first(tokens.split(torch.stack([signal, position], dim=-1), dim=1))
        for block in self.blocks:
            x = block(x, tokens)
        return tokens.gather(self.last(x), dim=1).squeeze(-1)  # the whole signal again, on every rank


class LongSequences(Recipe):
    """Smooths noisy waves."""

    supports_context_parallel = True
    defaults = {"batch_size": 2, "max_steps": 50, "learning_rate": 3e-3, "num_workers": 0}

    @dataclass
    class Config:
        length: int = 401
        """Number of tokens of a sample."""
        heads: int = 4
        """Number of attention heads."""

    def model(self) -> nn.Module:
        return Smoother(self.context, width=32, heads=self.config.heads, layers=2)

    def dataset(self, split: str) -> Any:
        times = torch.linspace(0, 1, self.config.length, dtype=torch.float64)
        return [
            torch.sin(2 * torch.pi * (1 + index % 7) * times + index) for index in range(64 if split == "train" else 8)
        ]

    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        wave = batch.to(next(model.parameters()).dtype)
        noisy = wave + 0.3 * noise.normal(wave.shape[1], dtype=wave.dtype)
        return Loss((model(noisy) - wave).square().sum(), wave.numel())
