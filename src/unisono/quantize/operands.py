"""Matrix products whose operands are quantised to fp8 or int8 on the fly: codes, and one scale per row.

Scales must not vary along the dimension that a product sums over, so both operands are stored with that dimension as
their columns. The scale of a row depends on that row only: on one token or on one output of a layer, never on the other
samples of a micro-batch.

fp8 is float8 e4m3, for gradients too: with a scale per token, three mantissa bits matter more than range. Its scales
are powers of two, so multiplying by them is exact, and the emulation rounds like the hardware. int8 has no exponent and
uses its whole range.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

LARGEST = {"fp8": 448.0, "int8": 127.0}
"""Largest magnitude of a code in each format."""

_SMALLEST_SCALE = 2.0**-100  # scale of a row of zeros; if it were smaller, the product of two scales could underflow
_FEW_ROWS = 16  # CUDA's int8 product requires more than this number of rows


def quantised_rows(rows: Tensor, format_name: str) -> tuple[Tensor, Tensor]:
    """Returns codes of the same shape, and float32 scales [rows, 1]; non-finite numbers give non-finite results."""
    scales = scales_for(rows.abs().amax(dim=-1, keepdim=True), format_name)
    units = rows * (1 / scales)
    return (units.round().to(torch.int8) if format_name == "int8" else units.to(torch.float8_e4m3fn)), scales


def scales_for(largest: Tensor, format_name: str) -> Tensor:
    """Returns float32 scales for values with magnitudes up to `largest`."""
    scales = (largest.float() / LARGEST[format_name]).clamp(min=_SMALLEST_SCALE)
    if format_name == "int8":
        return scales
    # Round up to the next power of two: add to a float's bits, then keep only the exponent.
    return (scales.view(torch.int32) + 0x7FFFFF & -0x800000).view(torch.float32)


def multiply(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    fp8_units: bool = False,
    fast: bool = True,
) -> Tensor:
    """Returns a @ b.T of codes, times scales [rows of a, 1] and [1, rows of b], plus a bias, in `dtype`.

    `fp8_units`: the device multiplies fp8 matrices; otherwise fp8 codes are converted to `dtype`, which is exact, and
    multiplied. `fast`: fp8 units accumulate in lower precision, which is faster.
    """
    if a.dtype == torch.int8:
        scaled = _integer_product(a, b).to(_wide(dtype)) * a_scales * b_scales
    elif fp8_units and dtype == torch.bfloat16:
        return torch._scaled_mm(
            a, b.t(), scale_a=a_scales, scale_b=b_scales, bias=bias, out_dtype=dtype, use_fast_accum=fast
        )
    else:
        scaled = (a.to(dtype) @ b.to(dtype).t()).to(_wide(dtype)) * a_scales * b_scales
    return (scaled if bias is None else scaled + bias).to(dtype)


def transposed(codes: Tensor) -> Tensor:
    """Returns the transposed codes in new contiguous memory; pads their rows with zeros to a multiple of 16."""
    if codes.dtype == torch.int8:
        return pad(codes.t(), (0, -len(codes) % 16)).contiguous()
    return pad(codes.view(torch.int8).t(), (0, -len(codes) % 16)).contiguous().view(codes.dtype)


def _integer_product(a: Tensor, b: Tensor) -> Tensor:
    if a.device.type == "cuda" and len(a) <= _FEW_ROWS:
        return torch._int_mm(pad(a, (0, 0, 0, _FEW_ROWS + 1 - len(a))), b.t())[: len(a)]
    return torch._int_mm(a, b.t())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
