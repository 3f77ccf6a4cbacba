"""Computes a Wan transformer's floating-point operations from a formula, because torch's counter misses our kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any


def forward_flops(config: Mapping[str, Any], latent: Sequence[int], text_length: int) -> float:
    """Returns the number of operations in one forward pass of a batch; a multiply-add counts as two.

    `config` is the transformer's config, `latent` the shape [batch, channels, frames, height, width] of its input.
    Embeddings, norms and the output layer, less than 1 % of the total, are not counted.
    """
    batch, _, *sizes = latent
    tokens = prod(size // patch for size, patch in zip(sizes, config["patch_size"], strict=True))
    width = config["num_attention_heads"] * config["attention_head_dim"]
    # Projections of self-attention and cross-attention queries; cross-attention keys and values; feed-forward layers.
    projections = 12 * width**2 * tokens + 4 * width**2 * text_length + 4 * width * config["ffn_dim"] * tokens
    attention = 4 * tokens**2 * width + 4 * tokens * text_length * width
    return float(batch * config["num_layers"] * (projections + attention))


def training_flops(forward: float, *, lora: bool) -> float:
    """Returns the number of operations in a forward and a backward pass.

    A LoRA saves a third of them, because the base weights need no gradients.
    """
    return (2.0 if lora else 3.0) * forward
