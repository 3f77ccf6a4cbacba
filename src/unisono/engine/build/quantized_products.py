"""Gives the trained linear layers of a model quantised products (`--mixed_precision fp8`, `--quantize`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from unisono.errors import ConfigError
from unisono.formatting import format_count
from unisono.parallel.strategy import Placement
from unisono.quantize.products import has_fp8_products
from unisono.quantize.trained_layers import Conversion, quantize_products, without_numbers
from unisono.quantize.trained_products import Products
from unisono.settings import PrecisionSettings

_SHOWN = 4


def quantize_trained(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    precision: PrecisionSettings,
    placement: Placement,
    exact: Collection[str] = (),
) -> list[str]:
    """Converts the layers in place and returns remarks; ConfigError if no layer fits."""
    format_name = precision.product_format
    if format_name is None:
        return []
    name = "mixed_precision fp8" if precision.mixed_precision == "fp8" else f"quantize {format_name}"
    has_units = format_name == "fp8" and has_fp8_products(placement.device)
    products = Products(format_name, precision.quantize_weight_gradient, has_units)
    conversion = quantize_products(model, blocks, products, precision.quantize_min_size, exact)
    sizes = f"multiples of 16, at least {precision.quantize_min_size} (quantize_min_size)"
    if not conversion.converted:
        raise ConfigError(f"{name}: {_why_none(conversion, sizes)}")
    return [
        f"{name}: {_summary(conversion, format_name, sizes)}",
        *_speed_remarks(name, products, precision, placement),
    ]


def _why_none(conversion: Conversion, sizes: str) -> str:
    if not conversion.unfit:
        return "this run trains no linear layers; remove it (base_precision quantises frozen weights)"
    layers = format_count(len(conversion.unfit), "trained linear layer")
    return f"none of the {layers} has sizes that fit ({sizes}); lower quantize_min_size, or remove it"


def _summary(conversion: Conversion, format_name: str, sizes: str) -> str:
    text = f"{format_count(len(conversion.converted), 'linear layer')} multiply in {format_name}"
    if conversion.unfit:
        names = without_numbers(conversion.unfit)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        text += f"; {len(conversion.unfit)} do not, because their sizes are not {sizes}: "
        text += ", ".join(names[:_SHOWN]) + more
    return text


def _speed_remarks(name: str, products: Products, precision: PrecisionSettings, placement: Placement) -> list[str]:
    device = placement.device
    if products.format_name == "fp8" and not products.fp8_units:
        device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        return [f"{name}: {device_name} has no fp8 products; they are emulated, which is slower than without {name}"]
    if device.type == "cuda" and not precision.compile:
        return [f"{name}: without compile, rounding the operands takes longer than the products save; use --compile"]
    return []
