"""Formats that store a frozen weight in 16, 8 or 4 bits: codes, and scales to multiply the codes by.

Every row of a matrix is encoded separately, from float32: a block of codes that share a scale never crosses a row. The
rows of a shard, or rows read from a file part by part, therefore get the same codes as in the whole matrix, and the
result does not depend on the number of ranks. torchao's NF4Tensor is not used, because it forms blocks over the
flattened matrix, its scales depend on the mean of all scales, and it rejects shards of different sizes.

| format | code | scale | bits per weight |
|---|---|---|---|
| bf16 | bfloat16 | none | 16 |
| fp8 | float8 e4m3 | one per row | 8 |
| int8 | -127 to 127 | one per row | 8 |
| nf4 | 16 quantiles of the normal distribution (Dettmers et al., QLoRA, 2023) | one per 64 columns | 4.25 |

Codes and scales are stored as int8, because `module.to(dtype)`, autocast and FSDP's mixed precision leave integers
unchanged, and because gloo and NCCL support int8 (but not int16, the size of a scale). Scales are rounded up to
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
"""Values of the 16 codes, as published."""


class Encoded(NamedTuple):
    """An encoded matrix; codes and scales have one row for each row of the matrix."""

    codes: Tensor
    scales: Tensor | None  # bytes of bfloat16 numbers


@dataclass(frozen=True)
class Format:
    """One format; its name is a value of the setting base_precision."""

    name: str
    bits: int  # bits per code
    largest: float = 0.0  # largest magnitude of a code
    block: int | None = None  # number of columns that share a scale; None: all columns

    @property
    def has_scales(self) -> bool:
        """Whether codes are multiplied by scales."""
        return self.largest > 0

    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype in which codes are stored."""
        return torch.int8 if self.has_scales else torch.bfloat16

    def num_code_columns(self, num_columns: int) -> int:
        """Returns the number of columns of the codes; nf4 stores two codes per byte."""
        return -(-num_columns // 2) if self.bits == 4 else num_columns

    def num_scale_columns(self, num_columns: int) -> int:
        """Returns the number of columns of the scales in bytes; a scale takes two bytes."""
        return 2 * -(-num_columns // (self.block or num_columns)) if self.has_scales else 0

    def num_bytes(self, num_rows: int, num_columns: int) -> int:
        """Returns the size of an encoded matrix in bytes."""
        codes = self.num_code_columns(num_columns) * self.code_dtype.itemsize
        return num_rows * (codes + self.num_scale_columns(num_columns))

    @torch.no_grad()
    def encode(self, matrix: Tensor) -> Encoded:
        """Encodes a matrix by the nearest codes. Computes in float32, so codes do not depend on the run's dtype."""
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
        """Returns the matrix that codes and scales represent."""
        if scales is None:
            return codes.to(dtype)
        # Multiply in float32: the scales of small weights are below float16's smallest normal number.
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
        """Returns the values of the codes as a new tensor."""
        if self.name == "int8":
            return codes.to(dtype)
        if self.name == "fp8":
            return codes.view(torch.float8_e4m3fn).to(dtype)
        packed = codes.view(torch.uint8)
        if torch.compiler.is_compiling():  # compiled code would copy a table to the device in every call
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
"""Maps values of the setting base_precision to formats."""


def _in_blocks(matrix: Tensor, size: int) -> Tensor:
    """Reshapes a matrix to (rows, blocks, columns of a block); pads the last block of each row with zeros."""
    filled = pad(matrix, (0, -matrix.shape[1] % size))
    return filled.view(len(matrix), filled.shape[1] // size, size)  # -1 would fail if a rank has no rows


def _rounded_up(scales: Tensor) -> Tensor:
    """Rounds non-negative float32 numbers up to bfloat16, and returns the bytes of the results."""
    bits = (scales.view(torch.int32) + 0xFFFF >> 16).to(torch.int16)
    if not len(bits):  # torch cannot view an empty tensor as a dtype of another size
        return bits.new_empty(0, 2 * bits.shape[1], dtype=torch.int8)
    return bits.view(torch.int8)


def _scales_from_bits(scales: Tensor) -> Tensor:
    """Converts scales to float32 by operations on their bytes.

    This avoids viewing them as bfloat16: code that torch 2.13 compiles for the CPU then reads wrong numbers if the row
    length is not a multiple of the block size.
    """
    parts = scales.view(torch.uint8).int()
    return ((parts[:, 1::2] << 8 | parts[:, ::2]) << 16).view(torch.float32)


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the values of the two codes in each possible byte, [256, 2]."""
    values = torch.tensor(NF4, dtype=dtype)
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1).to(device)


def _chosen(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes the values of nf4 codes by comparisons, which the compiler fuses into one kernel."""
    halves: list[Tensor | float] = list(NF4)
    for bit in (1, 2, 4, 8):
        is_set = (codes & bit) != 0
        halves = [torch.where(is_set, high, low) for low, high in zip(halves[::2], halves[1::2], strict=True)]
    result = halves[0]
    assert isinstance(result, Tensor)
    return result.to(dtype)
