"""Formats that store a frozen weight in 16, 8 or 4 bits: codes, and scales to multiply them by.

Every row of a matrix is encoded on its own, from float32: a block of codes that share a scale never crosses a row. So
the rows of a shard, or rows that are read from a file one part at a time, have the same codes as those of the whole
matrix, and the result does not depend on the number of ranks. torchao's NF4Tensor forms blocks over the flattened
matrix and its scales depend on the mean of all of them, and it rejects shards of different sizes; so it is not used.

| format | code | scale | bits per weight |
|---|---|---|---|
| bf16 | bfloat16 | none | 16 |
| fp8 | float8 e4m3 | one per row | 8 |
| int8 | -127 to 127 | one per row | 8 |
| nf4 | 16 quantiles of the normal distribution (Dettmers et al., QLoRA, 2023) | one per 64 columns | 4.25 |

Codes and scales are stored as int8. Integers are cast by nothing: neither `module.to(dtype)` nor autocast nor FSDP's
mixed precision changes them, and gloo and NCCL know int8 (but not int16, the size of a scale). Scales are rounded up to
bfloat16, so decoding to bfloat16 rounds only once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of the 16 codes, as published."""


class Encoded(NamedTuple):
    """A matrix in a format; codes and scales have a row for each of its rows."""

    codes: Tensor
    scales: Tensor | None  # bytes of bfloat16 numbers


@dataclass(frozen=True)
class Format:
    """One format; its name is a value of the setting base_precision."""

    name: str
    bits: int  # per code
    largest: float = 0.0  # magnitude of the largest code
    block: int | None = None  # columns that share a scale; None: all columns

    @property
    def has_scales(self) -> bool:
        """Whether codes are multiplied by scales."""
        return self.largest > 0

    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype in which codes are stored."""
        return torch.int8 if self.has_scales else torch.bfloat16

    def num_code_columns(self, num_columns: int) -> int:
        """The number of columns of the codes; nf4 stores two codes in a byte."""
        return -(-num_columns // 2) if self.bits == 4 else num_columns

    def num_scale_columns(self, num_columns: int) -> int:
        """The number of columns of the scales, each of which takes two bytes."""
        return 2 * -(-num_columns // (self.block or num_columns)) if self.has_scales else 0

    def num_bytes(self, num_rows: int, num_columns: int) -> int:
        """The size of an encoded matrix."""
        codes = self.num_code_columns(num_columns) * self.code_dtype.itemsize
        return num_rows * (codes + self.num_scale_columns(num_columns))

    @torch.no_grad()
    def encode(self, matrix: Tensor) -> Encoded:
        """The nearest codes; always computed from float32, so that they do not depend on the run's dtype."""
        if not self.has_scales:
            return Encoded(matrix.to(torch.bfloat16), None)
        num_columns = matrix.shape[1]
        blocks = _in_blocks(matrix.float(), self.block or num_columns)
        scales = _rounded_up(blocks.abs().amax(dim=-1) / self.largest)
        divisors = scales.view(torch.bfloat16).float()
        units = blocks / torch.where(divisors == 0, 1, divisors).unsqueeze(-1)  # a block of zeros has the scale 0
        units = units.flatten(1)[:, :num_columns].clamp(-self.largest, self.largest)
        return Encoded(self._nearest(units), scales)

    def _nearest(self, units: Tensor) -> Tensor:
        if self.name == "int8":
            return units.round().to(torch.int8)
        if self.name == "fp8":
            return units.to(torch.float8_e4m3fn).view(torch.int8)
        values = torch.tensor(NF4, device=units.device)
        codes = torch.bucketize(units, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8)
        even = pad(codes, (0, codes.shape[1] % 2))
        return (even[:, ::2] | even[:, 1::2] << 4).view(torch.int8)

    def decode(self, codes: Tensor, scales: Tensor | None, num_columns: int, dtype: torch.dtype) -> Tensor:
        """The matrix that codes and scales stand for."""
        if scales is None:
            return codes.to(dtype)
        # The scales of small weights are below float16's smallest normal number.
        wide = torch.float32 if dtype == torch.float16 else dtype
        matrix = self._values(codes, wide)[:, :num_columns]
        factors = scales.view(torch.bfloat16).to(wide)
        if self.block is None:
            return matrix.mul_(factors).to(dtype)
        if num_columns % self.block == 0:
            return matrix.view(len(matrix), -1, self.block).mul_(factors.unsqueeze(-1)).flatten(1).to(dtype)
        if torch.compiler.is_compiling():
            factors = _scales_from_bits(scales).to(wide)
        blocks = _in_blocks(matrix, self.block)
        return (blocks * factors.unsqueeze(-1)).flatten(1)[:, :num_columns].to(dtype)

    def _values(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The codes' values, in memory of their own."""
        if self.name == "int8":
            return codes.to(dtype)
        if self.name == "fp8":
            return codes.view(torch.float8_e4m3fn).to(dtype)
        packed = codes.view(torch.uint8)
        if torch.compiler.is_compiling():  # a table would be copied to the device in every call
            return torch.stack([_chosen(packed & 15, dtype), _chosen(packed >> 4, dtype)], dim=-1).flatten(1)
        pairs = _pairs(dtype, codes.device)
        return pairs.index_select(0, packed.int().flatten()).view(len(codes), 2 * codes.shape[1])


FORMATS = {
    each.name: each
    for each in (
        Format("bf16", 16),
        Format("fp8", 8, largest=448.0),
        Format("int8", 8, largest=127.0),
        Format("nf4", 4, largest=1.0, block=64),
    )
}
"""The formats by the values of the setting base_precision."""


def _in_blocks(matrix: Tensor, size: int) -> Tensor:
    """The matrix as (rows, blocks, columns of a block); the last block of a row is filled up with zeros."""
    filled = pad(matrix, (0, -matrix.shape[1] % size))
    return filled.view(len(matrix), filled.shape[1] // size, size)  # -1 would fail if a rank has no rows


def _rounded_up(scales: Tensor) -> Tensor:
    """The bytes of the smallest bfloat16 numbers that are not below these non-negative float32 numbers."""
    bits = (scales.view(torch.int32) + 0xFFFF >> 16).to(torch.int16)
    if not len(bits):  # torch cannot view a tensor without elements as another size
        return bits.new_empty(0, 2 * bits.shape[1], dtype=torch.int8)
    return bits.view(torch.int8)


def _scales_from_bits(scales: Tensor) -> Tensor:
    """The scales as float32, by operations on their bytes.

    Code that torch 2.13 compiles for the CPU reads wrong bfloat16 numbers if blocks do not divide a row evenly.
    """
    parts = scales.view(torch.uint8).int()
    return ((parts[:, 1::2] << 8 | parts[:, ::2]) << 16).view(torch.float32)


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256, 2] the values of the two codes in a byte."""
    values = torch.tensor(NF4, dtype=dtype)
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1).to(device)


def _chosen(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of nf4 codes by comparisons, which a compiler fuses into one kernel."""
    halves: list[Tensor | float] = list(NF4)
    for bit in (1, 2, 4, 8):
        is_set = (codes & bit) != 0
        halves = [torch.where(is_set, high, low) for low, high in zip(halves[::2], halves[1::2], strict=True)]
    result = halves[0]
    assert isinstance(result, Tensor)
    return result.to(dtype)
