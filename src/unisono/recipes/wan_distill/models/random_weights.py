"""Draws a student's initial weights from the distributions that Wan uses, identically on every machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor, nn

from unisono.data.bits import Purpose, key_of, random_bits, to_unit

_AT_ONCE = 2**20  # numbers to draw per chunk


@torch.no_grad()
def initialise_randomly(transformer: nn.Module, seed: int) -> None:
    """Fills a transformer with random initial weights, the same on every machine."""
    for name, weight in transformer.named_parameters():
        rows = max(1, _AT_ONCE // math.prod(weight.shape[1:]))
        for start in range(0, len(weight), rows):
            stop = min(start + rows, len(weight))
            weight[start:stop] = random_rows(name, weight.shape, start, stop, seed)


def random_rows(name: str, shape: Sequence[int], start: int, stop: int, seed: int) -> Tensor:
    """Draws rows of a weight: Xavier initialisation for layers, small numbers for embeddings, zeros for the output."""
    fan_in = math.prod(shape[1:])
    if name.endswith(".bias") or name.startswith("proj_out."):
        return torch.zeros(stop - start, *shape[1:])
    if len(shape) == 1:
        return torch.ones(stop - start)  # the weight of a norm
    if name.endswith("scale_shift_table"):
        std = shape[-1] ** -0.5
    elif "time_embedder." in name or "text_embedder." in name:
        std = 0.02
    else:
        std = math.sqrt(2 / (shape[0] + fan_in))
    # Uses uniform numbers even where Wan used normal ones, which need logarithms that machines round differently.
    bits = random_bits(key_of(Purpose.WEIGHTS, seed, crc32(name.encode())), torch.arange(start * fan_in, stop * fan_in))
    weights: Tensor = (to_unit(bits, torch.float32) - 0.5) * (std * math.sqrt(12))
    return weights.view(stop - start, *shape[1:])
