"""A student that begins with nothing: the weights that the originals began with, the same ones on every machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor, nn

from unisono.data.bits import Purpose, key_of, random_bits, to_unit

_AT_ONCE = 2**20  # numbers that are drawn together


@torch.no_grad()
def begin_fresh(transformer: nn.Module, seed: int) -> None:
    """Gives a transformer the weights that the originals began with; the same ones on every machine."""
    for name, weight in transformer.named_parameters():
        each = max(1, _AT_ONCE // math.prod(weight.shape[1:]))
        for start in range(0, len(weight), each):
            stop = min(start + each, len(weight))
            weight[start:stop] = fresh_rows(name, weight.shape, start, stop, seed)


def fresh_rows(name: str, shape: Sequence[int], start: int, stop: int, seed: int) -> Tensor:
    """Rows of a weight as the originals began: Xavier, small embeddings, and a head that says nothing yet."""
    across = math.prod(shape[1:])
    if name.endswith(".bias") or name.startswith("proj_out."):
        return torch.zeros(stop - start, *shape[1:])
    if len(shape) == 1:
        return torch.ones(stop - start)  # of a norm
    if name.endswith("scale_shift_table"):
        spread = shape[-1] ** -0.5
    elif "time_embedder." in name or "text_embedder." in name:
        spread = 0.02
    else:
        spread = math.sqrt(2 / (shape[0] + across))
    # Uniform numbers also where the originals drew normal ones: machines round a normal one's logarithm differently.
    bits = random_bits(key_of(Purpose.WEIGHTS, seed, crc32(name.encode())), torch.arange(start * across, stop * across))
    drawn: Tensor = (to_unit(bits, torch.float32) - 0.5) * (spread * math.sqrt(12))
    return drawn.view(stop - start, *shape[1:])
