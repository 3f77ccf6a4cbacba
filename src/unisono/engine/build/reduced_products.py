"""Makes the linear layers of a model compute quantised or sparse products (mixed_precision fp8, quantize, sparsity)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from unisono.errors import ConfigError
from unisono.formatting import format_count
from unisono.parallel.strategy import Placement
from unisono.quantize.products import has_fp8_products
from unisono.quantize.reduced_layers import Conversion, reduce_products, without_numbers
from unisono.quantize.reduced_products import Products
from unisono.quantize.sparse import has_sparse_products
from unisono.settings import PrecisionSettings

_SHOWN = 4


def reduce_linears(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    precision: PrecisionSettings,
    placement: Placement,
    exact: Collection[str] = (),
    *,
    sharded: bool = False,
) -> list[str]:
    """Converts the layers in place and returns notes for the user; raises ConfigError if it can convert no layer."""
    format_name, is_sparse = precision.product_format, precision.sparsity != "no"
    if format_name is None and not is_sparse:
        return []
    name = f"sparsity {precision.sparsity}" if is_sparse else f"quantize {format_name}"
    if precision.mixed_precision == "fp8":
        name = "mixed_precision fp8"
    products = Products(
        format_name or "",
        precision.quantize_weight_gradient,
        fp8_units=format_name == "fp8" and has_fp8_products(placement.device),
        sparse=is_sparse,
        sparse_units=is_sparse and has_sparse_products(placement.device),
        gathered=sharded,
    )
    conversion = reduce_products(model, blocks, products, precision.quantize_min_size, exact)
    sizes = f"multiples of 16, at least {precision.quantize_min_size} (quantize_min_size)"
    if not conversion.converted:
        raise ConfigError(f"{name}: {_why_none(conversion, sizes, is_sparse=is_sparse)}")
    summary = f"{name}: {_summary(conversion, format_name or 'sparse matrices', sizes)}"
    return [summary, *_speed_remarks(name, products, precision, placement)]


def _why_none(conversion: Conversion, sizes: str, *, is_sparse: bool) -> str:
    if not conversion.unfit:
        kind = "has no linear layers" if is_sparse else "trains no linear layers"
        return f"this run {kind} in repeated blocks; remove it" + (
            "" if is_sparse else " (base_precision quantises frozen weights)"
        )
    layers = format_count(len(conversion.unfit), "linear layer")
    return f"none of the {layers} has sizes that fit ({sizes}); lower quantize_min_size, or remove it"


def _summary(conversion: Conversion, format_name: str, sizes: str) -> str:
    is_one = len(conversion.converted) == 1
    text = f"{format_count(len(conversion.converted), 'linear layer')} {'multiplies' if is_one else 'multiply'}"
    text += f" in {format_name}" if format_name in ("fp8", "int8") else f" {format_name}"
    if conversion.unfit:
        names = without_numbers(conversion.unfit)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        text += f"; {len(conversion.unfit)} do not, because their sizes are not {sizes}: "
        text += ", ".join(names[:_SHOWN]) + more
    return text


def _speed_remarks(name: str, products: Products, precision: PrecisionSettings, placement: Placement) -> list[str]:
    device = placement.device
    is_emulated = products.sparse and not products.sparse_units
    if is_emulated or (products.format_name == "fp8" and not products.fp8_units):
        device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        kind = "sparse" if products.sparse else "fp8"
        return [f"{name}: {device_name} has no {kind} products; they are emulated, which is slower than without {name}"]
    if device.type == "cuda" and placement.compute_type is None:
        return [f"{name}: 32-bit products are emulated; with --mixed_precision bf16 the GPU computes them"]
    if device.type == "cuda" and not precision.compile:
        return [f"{name}: without compile, preparing operands costs more time than the products save; use --compile"]
    return []
