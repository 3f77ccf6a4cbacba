"""A Triton kernel that quantises rows: one program loads a row once, finds its scale and writes its codes."""

# Triton is missing on machines without a GPU, and the code it compiles is not typed Python.
# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PER_WARP = 1024  # columns


@triton.jit
def _quantise(rows, factors, codes, scales, width, FACTORS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = column < width
    value = tl.load(rows + row * width + column, mask=there, other=0.0).to(tl.float32)
    if FACTORS:
        value *= tl.load(factors + column, mask=there, other=0.0).to(tl.float32)
    scale = tl.math.div_rn(tl.max(tl.abs(value), 0), 448.0)
    units = value * tl.math.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale))
    units = tl.minimum(tl.maximum(units, -448.0), 448.0)
    tl.store(codes + row * width + column, units.to(tl.float8e4nv), mask=there)
    tl.store(scales + row, scale)


def quantised_rows(rows: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantises rows to fp8; returns codes and [rows, 1] scales. See `operations.quantised_rows`."""
    number, width = rows.shape
    codes = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
    scales = torch.empty(number, 1, dtype=torch.float32, device=rows.device)
    block = triton.next_power_of_2(width)
    warps = min(16, max(1, block // _PER_WARP))
    _quantise[(number,)](rows, factors, codes, scales, width, FACTORS=factors is not None, BLOCK=block, num_warps=warps)
    return codes, scales
