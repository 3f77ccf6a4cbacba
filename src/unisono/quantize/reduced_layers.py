"""Linear layers with quantised or sparse products, and the function that converts layers of a model to them.

The conversion replaces a layer's class in place. Its weight remains the same parameter with the same name, so
checkpoints, optimizers and averages do not change, and a run can resume with other products.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from unisono.parallel.blocks.repeated import has_autograd_functions
from unisono.quantize import reduced_products
from unisono.quantize.layers import linears
from unisono.quantize.reduced_products import Products
from unisono.quantize.sparse import pruned

_MULTIPLE = 16  # quantised products need matrix sizes that are multiples of this


class ReducedLinear(nn.Linear):
    """An nn.Linear that computes its matrix products as its attribute `products` specifies."""

    products: Products

    def forward(self, x: Tensor) -> Tensor:
        """Returns x @ weight.T + bias."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return _Product.apply(  # type: ignore[no-untyped-call,no-any-return]
            x.to(dtype), self.weight.to(dtype), bias, self.products
        )

    def extra_repr(self) -> str:
        """Describes sizes and products, for print(model)."""
        return f"{super().extra_repr()}, products={self.products.format_name or '2:4'}"


has_autograd_functions(ReducedLinear)


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, products: Products) -> Tensor:
        y, saved = reduced_products.linear(products, x, weight, bias)
        ctx.save_for_backward(*saved)
        ctx.products = products
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        of_input, of_weight, of_bias, _ = ctx.needs_input_grad
        saved = list(ctx.saved_tensors)
        dx, dweight = reduced_products.gradients(ctx.products, saved, dy, of_input=of_input, of_weight=of_weight)
        return dx, dweight, dy.flatten(0, -2).sum(0) if of_bias else None, None


def products_of(layer: nn.Module) -> Products | None:
    """Returns the products of a layer; None for a layer that is not converted."""
    return layer.products if type(layer) is ReducedLinear else None


@dataclass(frozen=True)
class Conversion:
    """Names of the layers that were converted, and of the layers whose sizes are unfit."""

    converted: Sequence[str]
    unfit: Sequence[str]


def reduce_products(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    products: Products,
    smallest: int,
    exact: Collection[str] = (),
) -> Conversion:
    """Converts the linear layers of `blocks` whose sizes are multiples of 16 and at least `smallest`.

    Quantised products are for trained weights only, because a frozen weight can be stored quantised (`layers.py`).
    Leaves out weights named in `exact`, weights that several modules share, and weights that another module reads.
    """
    converted, unfit = [], []
    for name in linears(model, blocks, _is_linear if products.sparse else _is_trained_linear, exact):
        layer: Any = model.get_submodule(name)
        sizes = (layer.in_features, layer.out_features)
        if min(sizes) < smallest or any(size % _MULTIPLE for size in sizes):
            unfit.append(name)
            continue
        layer.products = products
        layer.__class__ = ReducedLinear
        converted.append(name)
    return Conversion(converted, unfit)


def without_numbers(names: Iterable[str]) -> list[str]:
    """Replaces the block numbers in layer names by *, and removes duplicates: blocks.0.fc becomes blocks.*.fc."""
    return list(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name) for name in names))


def prune_weights(model: nn.Module) -> None:
    """Converts layers with sparse products to plain linear layers with pruned weights, which compute the same."""
    layer: Any
    for layer in model.modules():
        if type(layer) is ReducedLinear and layer.products.sparse:
            with torch.no_grad():
                layer.weight.copy_(pruned(layer.weight))
            del layer.products
            layer.__class__ = nn.Linear  # type: ignore[assignment]


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.weight.is_floating_point()


def _is_trained_linear(module: nn.Module) -> bool:
    return _is_linear(module) and module.weight.requires_grad  # type: ignore[return-value]
