"""Permutes range(size) by a key, one value at a time, so memory does not depend on the size.

A Feistel network permutes range(p) for the next power of two, p. Applying the network again until the value is in
range(size) (cycle walking) restricts it to a permutation of range(size) (Black and Rogaway 2002).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from unisono.data.bits import Integers, mix

_ROUNDS = 6


def permute(values: Integers, size: int, keys: Integers) -> Integers:
    """Returns the images of `values` under the permutation of range(size) that `keys` select, one key per value."""
    low_bits, low_mask, high_mask, round_keys = _network(size, keys)

    def feistel(x: Integers) -> Integers:
        low, high = x & low_mask, x >> low_bits
        for even, odd in zip(round_keys[::2], round_keys[1::2], strict=True):
            high = high ^ (mix(low + even) & high_mask)
            low = low ^ (mix(high + odd) & low_mask)
        return (high << low_bits) | low  # type: ignore[no-any-return]

    return _walk(values, size, feistel)


def invert(images: Integers, size: int, keys: Integers) -> Integers:
    """Returns the values that `permute` maps to `images`."""
    low_bits, low_mask, high_mask, round_keys = _network(size, keys)

    def inverse(x: Integers) -> Integers:
        low, high = x & low_mask, x >> low_bits
        for odd, even in zip(round_keys[::-2], round_keys[-2::-2], strict=True):
            low = low ^ (mix(high + odd) & low_mask)
            high = high ^ (mix(low + even) & high_mask)
        return (high << low_bits) | low  # type: ignore[no-any-return]

    return _walk(images, size, inverse)


def _network(size: int, keys: Integers) -> tuple[int, int, int, list[Integers]]:
    bits = (size - 1).bit_length()
    low_bits = (bits + 1) // 2
    round_keys = [keys + (number << 56) for number in range(_ROUNDS)]
    return low_bits, (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1, round_keys


def _walk(x: Integers, size: int, step: Callable[[Integers], Integers]) -> Integers:
    where: Any = torch.where if isinstance(x, torch.Tensor) else np.where
    x = step(x)
    while bool((outside := x >= size).any()):
        x = where(outside, step(x), x)
    return x
