"""Linear layers with a LoRA: computes the frozen product and the two low-rank products in one autograd function.

peft computes the same in separate modules: it casts the input to float32, saves it once per layer, and adds the
low-rank result in another pass over the output. Here, layers with the same input (q, k and v) share the saved input,
their A matrices are multiplied in one product, and the products with B accumulate into the output. The frozen weight
gets no gradient, so only the input and the [tokens, rank] result of A are saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from unisono.quantize.layers import FrozenLinear
from unisono.quantize.operations import add_product_, quantised_rows
from unisono.quantize.products import frozen_product

_PER_LAYER = 5  # number of the function's arguments that are tensors of one layer


class _Adapted(Function):
    """Computes x @ weight.T + bias + scale · (x @ A.T) @ B.T for several layers with the same input x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kinds: Any, factors: Any, *tensors: Any) -> Any:
        layers = _by_layer(tensors)
        rows, ranks = x.flatten(0, -2), [len(first) for _, _, _, first, _ in layers]
        firsts = torch.cat([first for _, _, _, first, _ in layers]) if len(layers) > 1 else layers[0][3]
        low = rows @ firsts.t()
        quantised = None
        if len(layers) > 1 and all(kind is not None and kind[2] for kind in kinds) and rows.dtype.itemsize == 2:
            quantised = quantised_rows(rows.contiguous())
        outputs = []
        for (weight, scales, bias, _, second), part, kind, factor in zip(
            layers, torch.split(low, ranks, 1), kinds, factors, strict=True
        ):
            base = _product(rows, weight, scales, bias, kind, transposed=True, quantised=quantised)
            outputs.append(add_product_(base, part, second.t(), factor).view(*x.shape[:-1], -1))
        frozen = [tensor for weight, scales, *_ in layers for tensor in (weight, scales)]
        ctx.save_for_backward(x, low, firsts, *frozen, *(second for *_, second in layers))
        ctx.kinds, ctx.factors, ctx.ranks = kinds, factors, ranks
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, low, firsts, *saved = ctx.saved_tensors
        number = len(ctx.kinds)
        frozen, seconds = saved[: 2 * number], saved[2 * number :]
        rows = [gradient.flatten(0, -2) for gradient in gradients]
        lows = low.split(ctx.ranks, 1)
        low_gradients = [row @ second * factor for row, second, factor in zip(rows, seconds, ctx.factors, strict=True)]
        low_gradient = torch.cat(low_gradients, 1) if number > 1 else low_gradients[0]
        first_gradients = (low_gradient.t() @ x.flatten(0, -2)).split(ctx.ranks)
        dx = None
        if ctx.needs_input_grad[0]:
            total: Tensor | None = None
            for row, weight, scales, kind in zip(rows, frozen[::2], frozen[1::2], ctx.kinds, strict=True):
                if kind is None and total is not None:
                    add_product_(total, row, weight.to(row.dtype))
                else:
                    part = _product(row, weight, scales, None, kind, transposed=False)
                    total = part if total is None else total + part
            assert total is not None
            dx = add_product_(total, low_gradient, firsts).view(x.shape)
        result: list[Any] = [dx, None, None]
        for row, part, first_gradient, factor in zip(rows, lows, first_gradients, ctx.factors, strict=True):
            result += [None, None, None, first_gradient, row.t() @ (part * factor)]
        return tuple(result)


def _by_layer(tensors: Sequence[Any]) -> list[Sequence[Any]]:
    return [tensors[start : start + _PER_LAYER] for start in range(0, len(tensors), _PER_LAYER)]


def _product(
    rows: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    kind: Any,
    *,
    transposed: bool,
    quantised: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    if kind is not None:  # a quantized weight
        format_name, num_columns, fp8_products = kind
        return frozen_product(rows, weight, scales, bias, format_name, num_columns, transposed, fp8_products, quantised)
    weight = weight.to(rows.dtype)
    return F.linear(rows, weight if transposed else weight.t(), bias)


def is_adapted(layer: Any) -> bool:
    """Whether a layer is a frozen linear layer with exactly one active LoRA, without dropout or DoRA."""
    base = getattr(layer, "base_layer", None)
    if type(base) is not nn.Linear and type(base) is not FrozenLinear:
        return False
    if not hasattr(layer, "lora_A"):  # a LoKr
        return False
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    return (
        type(layer).__name__ == "Linear"
        and len(active) == 1
        and not (layer.disable_adapters or layer.merged or layer.lora_variant or layer.lora_bias[active[0]])
        and type(layer.lora_dropout[active[0]]) is nn.Identity
        and not base.weight.requires_grad
        and (base.bias is None or not base.bias.requires_grad)
    )


def adapted(layers: Sequence[Any], x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Returns the outputs of `layers` for the input x, computed in `dtype`; `is_adapted` must hold for each layer."""
    kinds: list[tuple[str, int, bool] | None] = []
    factors: list[float] = []
    tensors: list[Tensor | None] = []
    for layer in layers:
        base = layer.base_layer
        if type(base) is FrozenLinear:
            kinds.append((base.format_name, base.in_features, base.fp8_products))
        else:
            kinds.append(None)
        [active] = [name for name in layer.active_adapters if name in layer.lora_A]
        factors.append(float(layer.scaling[active]))
        bias = None if base.bias is None else base.bias.to(dtype)
        first, second = (half[active].weight.to(dtype) for half in (layer.lora_A, layer.lora_B))
        tensors += [base.weight, getattr(base, "weight_scales", None), bias, first, second]
    outputs: tuple[Tensor, ...] = _Adapted.apply(x.to(dtype), tuple(kinds), tuple(factors), *tensors)  # type: ignore[no-untyped-call]
    return list(outputs)
