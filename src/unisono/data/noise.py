"""Draws random numbers that belong to samples.

A draw has one row per sample. The row depends only on the seed, the position of the sample in the stream and the number
of the draw, and not on the rank, the micro-batch or the device. So a sample gets the same noise wherever and whenever
it is computed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unisono.data.bits import Purpose, key_of, keys_for, random_bits, to_unit


class Noise:
    """Draws random tensors with one row per sample of the batch, on the batch's device."""

    def __init__(self, seed: int, positions: Tensor, first_draw: int = 0) -> None:
        self._seed = seed
        self._positions = positions  # [batch], int64
        self._draws = first_draw

    def _bits(self, shape: tuple[int, ...]) -> Tensor:
        """Returns random bits for the next draw, of shape [batch, *shape]."""
        rows = keys_for(key_of(Purpose.NOISE, self._seed, self._draws), self._positions)
        self._draws += 1
        counter = torch.arange(math.prod(shape), device=self._positions.device)
        return random_bits(rows[:, None], counter[None, :]).view(len(self._positions), *shape)

    def uniform(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draws uniform numbers in [0, 1), of shape [batch, *shape]."""
        dtype = dtype or torch.get_default_dtype()
        return to_unit(self._bits(shape), _compute_type(dtype)).to(dtype)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draws standard normal numbers, of shape [batch, *shape]."""
        dtype = dtype or torch.get_default_dtype()
        compute = _compute_type(dtype)
        bits = self._bits(shape)
        # The Box-Muller transform: the high half of the bits gives the radius, the low half the angle. Adding 0.5
        # avoids log(0).
        radius = torch.sqrt(-2 * torch.log((((bits >> 32) & 0xFFFFFFFF).to(compute) + 0.5) * 2.0**-32))
        angle = (bits & 0xFFFFFFFF).to(compute) * (2 * math.pi * 2.0**-32)
        return (radius * torch.cos(angle)).to(dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Draws uniform integers from low to high - 1, of shape [batch, *shape]."""
        # The bias of 63 random bits modulo a range below 2^31 is under 2^-32.
        return low + ((self._bits(shape) & (2**63 - 1)) % (high - low))


def _compute_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
