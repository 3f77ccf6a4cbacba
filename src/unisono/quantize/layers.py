"""Frozen linear layers with a quantised weight, and the function that converts layers of a model to them.

The conversion replaces a layer's class in place: the layer keeps its name and its bias, its codes are named `weight`,
and a LoRA around it (peft's `base_layer`) works as before. Codes and scales are parameters without a gradient rather
than buffers, because ddp would broadcast buffers in every step, and a step that may be retried would copy them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import RecipeError
from unisono.quantize.formats import FORMATS, Encoded
from unisono.quantize.products import FrozenProduct, fits_fp8_products

SCALES = "weight_scales"
"""Name of the parameter with the scales of `weight`."""


class FrozenLinear(nn.Linear):
    """A frozen nn.Linear with a quantised weight."""

    weight_scales: nn.Parameter | None
    format_name: str
    fp8_products: bool  # whether the device multiplies the codes without decoding them

    def forward(self, x: Tensor) -> Tensor:
        """Returns x @ weight.T + bias."""
        return _apply(self, x, self.in_features, transposed=True)

    def extra_repr(self) -> str:
        """Describes sizes and format, for print(model)."""
        return f"{super().extra_repr()}, format={self.format_name}"


def _conv1d() -> type[nn.Module] | None:
    """Returns transformers' Conv1D, GPT-2's linear layer with a weight of shape [in, out]; None if not imported."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


@cache
def _frozen_conv1d(plain: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return _apply(self, x, self.nf, transposed=False)

    return type("FrozenConv1D", (plain,), {"forward": forward, "__module__": __name__})


def _apply(layer: Any, x: Tensor, num_columns: int, *, transposed: bool) -> Tensor:
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    bias = layer.bias
    # The product adds a frozen bias without another pass over the output.
    inside = bias is not None and not bias.requires_grad
    result: Tensor = FrozenProduct.apply(  # type: ignore[no-untyped-call]
        x.to(dtype),
        layer.weight,
        layer.weight_scales,
        bias.to(dtype) if inside else None,
        layer.format_name,
        num_columns,
        transposed,
        layer.fp8_products,
    )
    return result if bias is None or inside else result + bias.to(dtype)


@dataclass(frozen=True)
class Quantized:
    """The layers of a model that `quantize` has converted."""

    layers: Sequence[str] = ()  # names of the layers
    bytes_before: int = 0
    bytes_after: int = 0

    def __add__(self, other: Quantized) -> Quantized:
        return Quantized(
            (*self.layers, *other.layers), self.bytes_before + other.bytes_before, self.bytes_after + other.bytes_after
        )


def frozen_linears(model: nn.Module, blocks: Iterable[nn.Module], exact: Collection[str] = ()) -> list[str]:
    """Returns the names of the frozen linear layers in `blocks`; no blocks: in the whole model. See `linears`."""
    return linears(model, blocks, is_frozen_linear, exact)


def linears(
    model: nn.Module, blocks: Iterable[nn.Module], accepts: Callable[[Any], bool], exact: Collection[str] = ()
) -> list[str]:
    """Returns the names of the linear layers in `blocks` for which `accepts` is true; no blocks: in the whole model.

    Leaves out weights named in `exact`, weights that several modules share, and layers whose parent module reads their
    weight directly: torch.nn's attention, and its encoder layer, which uses one fused kernel in evaluation.
    """
    inside = {id(part) for block in blocks for part in block.modules()}
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    read_by_owner = {
        id(child)
        for owner in model.modules()
        if isinstance(owner, nn.MultiheadAttention | nn.TransformerEncoderLayer)
        for child in owner.children()
    }
    return [
        name
        for name, module in model.named_modules()
        if accepts(module)
        and (not inside or id(module) in inside)
        and uses[id(module.weight)] == 1
        and id(module) not in read_by_owner
        and f"{name}.weight" not in exact
    ]


def is_frozen_linear(module: nn.Module) -> bool:
    """Returns whether a module is a plain linear layer with a frozen weight; a subclass might read the weight."""
    if type(module) is not nn.Linear and type(module) is not _conv1d():
        return False
    weight = module.weight
    return isinstance(weight, Tensor) and not weight.requires_grad and weight.is_floating_point()


def check_names(model: nn.Module, names: Iterable[str], hook: str) -> list[str]:
    """Returns the layer names that a recipe chose; raises RecipeError if a layer is not linear or not frozen."""
    layers = dict(model.named_modules())
    for name in (names := list(names)):
        if name not in layers or not is_frozen_linear(layers[name]):
            raise RecipeError(f"{hook}: {name} is not a frozen linear layer (nn.Linear, or Conv1D of transformers)")
    return names


def quantize(model: nn.Module, names: Iterable[str], format_name: str, *, fp8_products: bool = False) -> Quantized:
    """Converts layers in place. Weights may be on the meta device, to be filled later.

    `fp8_products`: whether the device has fp8 matrix units; layers whose sizes do not fit them are decoded anyway.
    """
    kind, converted, before, after = FORMATS[format_name], [], 0, 0
    for name in names:
        layer: Any = model.get_submodule(name)
        weight = layer.weight.detach()
        num_rows, num_columns = weight.shape
        encoded = _empty(weight, format_name) if weight.is_meta else kind.encode(weight)
        layer.weight = nn.Parameter(encoded.codes, requires_grad=False)
        scales = None if encoded.scales is None else nn.Parameter(encoded.scales, requires_grad=False)
        layer.register_parameter(SCALES, scales)
        layer.format_name = format_name
        layer.fp8_products = fp8_products and format_name == "fp8" and fits_fp8_products(num_rows, num_columns)
        plain: Any = type(layer)
        layer.__class__ = FrozenLinear if plain is nn.Linear else _frozen_conv1d(plain)
        converted.append(name)
        before += weight.numel() * weight.element_size()
        after += kind.num_bytes(num_rows, num_columns)
    return Quantized(converted, before, after)


def dequantize(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Converts layers back to plain linear layers, with decoded weights in `dtype` (default: torch's default dtype)."""
    layer: Any
    for layer in model.modules():
        is_linear = type(layer) is FrozenLinear
        if not is_linear and type(layer).__name__ != "FrozenConv1D":
            continue
        num_columns = layer.in_features if is_linear else layer.nf
        wanted = dtype or torch.get_default_dtype()
        matrix = FORMATS[layer.format_name].decode(layer.weight, layer.weight_scales, num_columns, wanted)
        layer.weight = nn.Parameter(matrix, requires_grad=False)
        del layer._parameters[SCALES], layer.format_name, layer.fp8_products
        layer.__class__ = nn.Linear if is_linear else type(layer).__bases__[0]


def _empty(weight: Tensor, format_name: str) -> Encoded:
    kind = FORMATS[format_name]
    num_rows, num_columns = weight.shape
    codes = weight.new_empty(num_rows, kind.num_code_columns(num_columns), dtype=kind.code_dtype)
    if not kind.has_scales:
        return Encoded(codes, None)
    return Encoded(codes, weight.new_empty(num_rows, kind.num_scale_columns(num_columns), dtype=torch.int8))
