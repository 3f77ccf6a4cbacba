"""Computes random bits as a pure function of a key and a counter.

The sample order and the noise of a sample are derived from these bits, so there is no generator state to save, seed or
advance. The functions consist of integer tensor operations. CPU and CUDA therefore give the same bits, unlike torch's
own generators, and the functions can be compiled and captured in a CUDA graph. Those that use only operators also
accept int64 numpy arrays, which are ten times faster for the few positions of a batch.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, TypeVar

import torch
from torch import Tensor

Integers = TypeVar("Integers", bound=Any)  # an int64 torch.Tensor or numpy.ndarray


class Purpose(IntEnum):
    """What random numbers are used for. It is the first part of every key, so no two purposes share numbers."""

    ORDER = 1
    NOISE = 2
    ITEM = 3
    DROPOUT = 4
    EVALUATION = 5
    WEIGHTS = 6
    PREVIEW = 7
    BUILD = 8


_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """Returns the int64 with the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_GOLDEN_S, _FIRST_S, _SECOND_S = _signed(_GOLDEN), _signed(_FIRST), _signed(_SECOND)


def _shift_right(x: Integers, places: int) -> Integers:
    # Signed integers have only an arithmetic shift, which copies the sign bit; the mask removes the copies.
    return (x >> places) & ((1 << (64 - places)) - 1)  # type: ignore[no-any-return]


def mix(x: Integers) -> Integers:
    """Applies splitmix64, a bijection of 64-bit integers in which each input bit affects half of the output bits."""
    x = (x ^ _shift_right(x, 30)) * _FIRST_S
    x = (x ^ _shift_right(x, 27)) * _SECOND_S
    return x ^ _shift_right(x, 31)  # type: ignore[no-any-return]


def random_bits(key: Tensor | int, counter: Tensor) -> Tensor:
    """Returns 64 random bits for each pair of key and counter; the two tensors are broadcast against each other."""
    # Use the key in two rounds. With a single round, different keys would give the same sequence from different
    # starting points, and with 10^9 samples some of these would overlap.
    return mix(mix(counter * _GOLDEN_S + key) + key)


def key_of(*parts: int) -> int:
    """Combines several integers into a 64-bit key. Works on Python integers."""
    key = 0
    for part in parts:
        key = (key + part + 1) * _GOLDEN & ((1 << 64) - 1)
        key = (key ^ (key >> 30)) * _FIRST & ((1 << 64) - 1)
        key = (key ^ (key >> 27)) * _SECOND & ((1 << 64) - 1)
        key ^= key >> 31
    return _signed(key)


def keys_for(key: int, values: Integers) -> Integers:
    """Derives a key for each value from a common key."""
    return mix(values * _GOLDEN_S + key) ^ _SECOND_S  # type: ignore[no-any-return]


def to_unit(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts random bits to uniform numbers in [0, 1), with 24 random bits for float32 and 53 for float64."""
    places = 53 if dtype == torch.float64 else 24
    return _shift_right(bits, 64 - places).to(dtype) * 2.0**-places
