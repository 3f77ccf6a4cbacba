"""A causal transformer that reads a learning history and predicts the next action.

It gets one token per step: the agent's cell, and the action and the reward that led there. x and y have separate
embeddings instead of one embedding per cell, so what the model learns about a column also applies to cells that were
never a goal. Attention is causal and needs no mask tensor; a rollout caches keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.recipes.darkroom.rooms import NUM_ACTIONS

NO_ACTION = NUM_ACTIONS
"""The previous action at the start of a context."""
SEPARATOR_KINDS = 3
"""Kinds of tokens in a two-region context: a step, and the start and the end of the previous region."""


class Tokens(NamedTuple):
    """The steps of a batch of contexts; each tensor is [batch, length], int64."""

    cells: Tensor
    actions: Tensor  # the previous action, or NO_ACTION
    rewards: Tensor  # the previous reward
    separators: Tensor | None = None  # two-region contexts: 0 is a step, 1 and 2 are separators


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    room_size: int
    context: int  # maximum number of tokens
    width: int = 64
    num_layers: int = 4
    num_heads: int = 4
    inner: int = 256
    dropout: float = 0.0
    attention_dropout: float = 0.0
    separators: bool = False  # whether contexts have two regions


class Cache:
    """Attention keys and values of all layers for the tokens so far.

    The cache is allocated at full size, and the position of the next token is a tensor, so that every step runs the
    same kernels and can be recorded as a CUDA graph.
    """

    def __init__(self, shape: Shape, batch: int, device: torch.device, dtype: torch.dtype) -> None:
        size = (shape.num_layers, batch, shape.num_heads, shape.context, shape.width // shape.num_heads)
        self.keys, self.values = (torch.zeros(size, device=device, dtype=dtype) for _ in range(2))
        self.next = torch.zeros(1, device=device, dtype=torch.int64)
        self._slots = torch.arange(shape.context, device=device)

    def clear(self) -> None:
        """Removes all tokens from the cache."""
        self.next.zero_()

    def fill(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Stores the first tokens of an empty cache: [batch, heads, length, head width]."""
        length = keys.shape[2]
        self.keys[layer, :, :, :length], self.values[layer, :, :, :length] = keys, values

    def add(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Adds one token; returns all keys and values of the layer, and a mask that marks the valid ones."""
        self.keys[layer].index_copy_(2, self.next, key.to(self.keys.dtype))
        self.values[layer].index_copy_(2, self.next, value.to(self.values.dtype))
        return self.keys[layer], self.values[layer], (self._slots <= self.next).view(1, 1, 1, -1)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self._layer, self._heads, self.attention_dropout = layer, shape.num_heads, shape.attention_dropout
        # Linear layers have no biases, because computing the biases' gradients took a tenth of the step on a GPU.
        self.norm_attention = nn.LayerNorm(shape.width, bias=False)
        self.queries_keys_values = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.mix = nn.Linear(shape.width, shape.width, bias=False)
        self.norm_inner = nn.LayerNorm(shape.width, bias=False)
        self.widen = nn.Linear(shape.width, shape.inner, bias=False)
        self.narrow = nn.Linear(shape.inner, shape.width, bias=False)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """Maps [batch, length, width] to the same shape."""
        x = x + self.dropout(self._attend(self.norm_attention(x), cache))
        return x + self.dropout(self.narrow(F.relu(self.widen(self.norm_inner(x)))))  # type: ignore[no-any-return]

    def _attend(self, x: Tensor, cache: Cache | None) -> Tensor:
        batch, length, width = x.shape
        parts = self.queries_keys_values(x).view(batch, length, 3, self._heads, width // self._heads)
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))  # [batch, heads, length, head width]
        if cache is not None and length == 1:
            keys, values, mask = cache.add(self._layer, key, value)
            mixed = F.scaled_dot_product_attention(query, keys.to(query.dtype), values.to(query.dtype), attn_mask=mask)
        else:
            if cache is not None:
                cache.fill(self._layer, key, value)
            dropout = self.attention_dropout if self.training else 0.0
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.mix(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class HistoryTransformer(nn.Module):
    """Predicts the logits of the next action at each step of a history."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        features = 2 * shape.room_size + NUM_ACTIONS + 1 + 1
        # Multiplies one-hot vectors by a matrix instead of looking up embeddings, whose backward pass would add
        # 100,000 gradients to nine rows.
        self.embed = nn.Linear(features, shape.width, bias=False)
        self.embed_separator = nn.Embedding(SEPARATOR_KINDS, shape.width) if shape.separators else None
        self.positions = nn.Parameter(torch.empty(shape.context, shape.width))
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape, layer) for layer in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, NUM_ACTIONS)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            # The residual stream grows with every layer, so the layers that add to it have smaller initial weights (as
            # in GPT-2).
            residual = name.endswith(("mix.weight", "narrow.weight"))
            std = 0.02 / (2 * self.shape.num_layers) ** 0.5 if residual else 0.1 if name == "embed.weight" else 0.02
            nn.init.normal_(parameter, std=std)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tokens, cache: Cache | None = None) -> Tensor:
        """Returns logits, [batch, length, actions]. With a cache, a single token continues the cached tokens."""
        length = tokens.cells.shape[1]
        if cache is not None and length == 1:
            positions = self.positions.index_select(0, cache.next)
        else:
            positions = self.positions[:length]
        x = self.embed(self._one_hot(tokens))
        x = x + positions.to(x.dtype)
        if self.embed_separator is not None and tokens.separators is not None:
            x = x + self.embed_separator(tokens.separators).to(x.dtype)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, cache)
        if cache is not None:
            cache.next += length
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def new_cache(self, batch: int, dtype: torch.dtype) -> Cache:
        """Returns an empty cache for a batch of histories."""
        return Cache(self.shape, batch, self.positions.device, dtype)

    def _one_hot(self, tokens: Tokens) -> Tensor:
        size, dtype = self.shape.room_size, self.embed.weight.dtype
        x = torch.div(tokens.cells, size, rounding_mode="floor")
        columns = ((x, size), (tokens.cells - x * size, size), (tokens.actions, NUM_ACTIONS + 1))
        hot = [(values[..., None] == torch.arange(width, device=values.device)).to(dtype) for values, width in columns]
        return torch.cat([*hot, tokens.rewards[..., None].to(dtype)], dim=-1)
