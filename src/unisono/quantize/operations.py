"""Two operations around matrix products, registered with PyTorch, which torch.compile treats as opaque.

From plain PyTorch, the compiler generates code that reads each row twice to quantise it, and that copies a matrix
before adding a product to it. Together these take a tenth of a LoRA's step on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LARGEST_FP8 = 448.0
"""The largest number of float8 e4m3."""

# torch.library.Library instead of torch.library.custom_op, which has more overhead per call.
_LIBRARY = torch.library.Library("unisono", "FRAGMENT")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.pt2_compliant_tag,)


def quantised_rows(rows: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantises rows to fp8, after multiplying the columns by `factors`; returns codes and [rows, 1] scales."""
    return torch.ops.unisono.quantised_rows(rows, factors)  # type: ignore[no-any-return]


def add_product_(out: Tensor, left: Tensor, right: Tensor, factor: float = 1.0) -> Tensor:
    """Computes out += factor · left @ right in place, as one matrix product, without a gradient."""
    torch.ops.unisono.add_product_(out, left, right, factor)
    return out


def _quantised_rows(rows: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    wide = rows.float() if factors is None else rows.float() * factors.float()
    scales = wide.abs().amax(dim=-1, keepdim=True) / LARGEST_FP8
    units = wide * torch.where(scales == 0, 1, scales).reciprocal()  # like the kernel, where a division would be slow
    return units.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn), scales


def _quantised_rows_by_kernel(rows: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    from unisono.quantize.triton_kernels import quantised_rows as by_kernel

    with torch.cuda.device(rows.device):  # Triton launches on the current device
        return by_kernel(rows.contiguous(), None if factors is None else factors.contiguous())


def _shapes(rows: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape, dtype=torch.float8_e4m3fn), rows.new_empty(len(rows), 1, dtype=torch.float32)


def _add_product_(out: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
    out.addmm_(left, right, alpha=factor)


def _register(name: str, schema: str, fake: Any, **by_device: Any) -> None:
    _LIBRARY.define(f"{name}{schema}", tags=_TAGS)  # type: ignore[no-untyped-call]
    for device, compute in by_device.items():
        _LIBRARY.impl(name, compute, device)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"unisono::{name}", fake)


_register(
    "quantised_rows",
    "(Tensor rows, Tensor? factors) -> (Tensor, Tensor)",
    _shapes,
    CPU=_quantised_rows,
    CUDA=_quantised_rows_by_kernel,
)
_register(
    "add_product_",
    "(Tensor(a!) out, Tensor left, Tensor right, float factor) -> ()",
    lambda out, left, right, factor: None,
    CPU=_add_product_,
    CUDA=_add_product_,
)
