"""Parts of a Wan block with their own backward passes: norms, gates, rotary embeddings and linear layers.

The mathematics is that of diffusers' modules, but divided differently: in the backward pass, sums over all tokens are
computed in a kernel that has already loaded the numbers, and gradients of the same tensor are added in one kernel. The
gradient of a layer's bias is therefore computed by the consumer of the layer's output, which gets the bias as an
argument (`made`), and not by the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from unisono.quantize import reduced_products
from unisono.quantize.reduced_layers import ReducedLinear, products_of
from unisono.quantize.reduced_products import Products
from unisono.recipes.wan.models.kernels import operations
from unisono.recipes.wan.models.kernels.adapter import adapted, is_adapted

_ONES = 16  # number of rows of ones whose product with a matrix sums its rows; fewer rows would not be faster


def _type(bias: Tensor | None) -> torch.dtype | None:
    return None if bias is None else bias.dtype


class _Normed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
        _, y, mean, rstd = operations.norm(x, None, None, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return x.view_as(x), y

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dy: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        dx, _, sums = operations.norm_backward(dh, dy, x, None, None, weight, mean, rstd, False)
        return dx, sums[0], sums[1], None


class _Added(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, o: Tensor, gate: Any, weight: Tensor, bias: Tensor, eps: float, made: Any) -> Any:
        h, y, mean, rstd = operations.norm(x, o, gate, weight, bias, eps)
        ctx.gated, ctx.type, ctx.made = gate is not None, o.dtype, _type(made)
        ctx.save_for_backward(h, weight, mean, rstd, *((o, gate) if gate is not None else ()))
        return h, y

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dy: Tensor) -> Any:
        h, weight, mean, rstd, *more = ctx.saved_tensors
        o, gate = more if ctx.gated else (None, None)
        dx, do, sums = operations.norm_backward(dh, dy, h, o, gate, weight, mean, rstd, ctx.made is not None)
        made = sums[-1].sum(0).to(ctx.made) if ctx.made else None
        if ctx.gated:
            return dx, do, sums[2], sums[0], sums[1], None, made
        return dx, dx.to(ctx.type), None, sums[0], sums[1], None, made


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, o: Tensor, gate: Tensor, made: Any) -> Any:
        ctx.save_for_backward(o, gate)
        ctx.made = _type(made)
        rows = (len(gate), -1, x.shape[-1])
        return (x.float().view(rows) + o.float().view(rows) * gate[:, None]).view(x.shape).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> Any:
        do, sums = operations.gate_backward(dh, *ctx.saved_tensors)
        return dh, do, sums[0], sums[1].sum(0).to(ctx.made) if ctx.made else None


class _Rotated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, made: Any, weight: Tensor, cosine: Any, sine: Any, head: int, eps: float) -> Any:
        y, rstd = operations.rotate(x, weight, cosine, sine, head, eps)
        ctx.rotated, ctx.head, ctx.made = cosine is not None, head, _type(made)
        ctx.save_for_backward(x, weight, rstd, *((cosine, sine) if cosine is not None else ()))
        rest = x[..., weight.numel() :]
        return (*y.unbind(0), rest) if rest.shape[-1] else y.unbind(0)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        x, weight, rstd, *more = ctx.saved_tensors
        cosine, sine = more if ctx.rotated else (None, None)
        dx, sums = operations.rotate_backward(list(dy), x, weight, cosine, sine, rstd, ctx.head)
        made = sums[len(weight) :].flatten().to(ctx.made) if ctx.made else None
        return dx, made, sums[: len(weight)].to(weight.dtype), None, None, None, None


class _Linear(Function):
    """A linear layer that computes its bias's gradient, by a matrix product, only if no consumer computes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, products: Products | None) -> Any:
        y, saved = reduced_products.linear(products, x, weight, bias)
        ctx.save_for_backward(*saved)
        ctx.products = products
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        saved, rows = list(ctx.saved_tensors), dy.flatten(0, -2)
        dx, dweight = reduced_products.gradients(ctx.products, saved, dy, of_input=ctx.needs_input_grad[0])
        summed = (rows.new_ones(_ONES, len(rows)) @ rows)[0] if ctx.needs_input_grad[2] else None
        return dx, dweight, summed, None


class _LinearGelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, products: Products | None) -> Any:
        inner, saved = reduced_products.linear(products, x, weight, bias)
        ctx.save_for_backward(inner, *saved)
        ctx.products = products
        return F.gelu(inner, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        inner, *saved = ctx.saved_tensors
        gradient, summed = operations.gelu_backward(dy, inner)
        return *reduced_products.gradients(ctx.products, saved, gradient), summed.to(dy.dtype), None


def _is_plain(layer: Any) -> bool:
    """Whether a layer is fully trained. Frozen layers and layers with an adapter use their own forward pass."""
    return (
        type(layer) in (nn.Linear, ReducedLinear)
        and layer.bias is not None
        and layer.bias.requires_grad
        and layer.weight.requires_grad
    )


def _type_for(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _in_type(x: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(_type_for(x)) for tensor in (x, *tensors)]


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)


def linear(layer: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the layer's output, and its bias if the consumer must compute the bias's gradient (`made`)."""
    if is_adapted(layer):
        return adapted([layer], x, _type_for(x))[0], None
    if not _is_plain(layer):
        return layer(x), None
    return _apply(_Linear, *_in_type(x, layer.weight, layer.bias.detach()), products_of(layer)), layer.bias


def linear_gelu(layer: Any, x: Tensor) -> Tensor:
    """Returns gelu of the layer's output."""
    if _is_plain(layer):
        return _apply(  # type: ignore[no-any-return]
            _LinearGelu, *_in_type(x, layer.weight, layer.bias), products_of(layer)
        )
    return F.gelu(linear(layer, x)[0], approximate="tanh")


def normed(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns x, and layer_norm(x) · weight + bias; weight and bias are [groups, width]."""
    return _apply(_Normed, x, weight, bias, eps)  # type: ignore[no-any-return]


def added_and_normed(
    x: Tensor, o: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float, made: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns h = x + o · gate, and layer_norm(h) · weight + bias; `made` is the bias of the layer that computed o."""
    return _apply(_Added, x, o, gate, weight, bias, eps, made)  # type: ignore[no-any-return]


def gated(x: Tensor, o: Tensor, gate: Tensor, made: Tensor | None) -> Tensor:
    """Returns x + o · gate; `made` is the bias of the layer that computed o."""
    return _apply(_Gated, x, o, gate, made)  # type: ignore[no-any-return]


def rotated(layers: Sequence[Any], x: Tensor, norms: Sequence[Any], angles: Any, head: int) -> list[Tensor]:
    """Returns each layer's output for x; applies RMS norm and rotary embedding to the layers that have a norm.

    Angles are (cosine, sine), each [tokens, head]. Fully trained layers are computed as one matrix product if their
    weights must be cast to another dtype anyway. Otherwise they are not, because the concatenated copy is kept until
    the backward pass, whereas FSDP would free the weights.
    """
    weights, rest = [norm.weight for norm in norms], (*(angles or (None, None)), head, norms[0].eps)
    plain, products = all(map(_is_plain, layers)), products_of(layers[0])
    is_alike = all(products_of(layer) == products for layer in layers)
    if plain and is_alike and all(layer.weight.dtype != _type_for(x) for layer in layers):
        weight, bias = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
        out = _apply(_Linear, *_in_type(x, weight, bias.detach()), products)
        return list(_apply(_Rotated, out, bias, torch.stack(weights), *rest))
    outputs = []
    if all(map(is_adapted, layers)):
        for number, out in enumerate(adapted(layers, x, _type_for(x))):
            if number < len(norms):
                outputs += _apply(_Rotated, out, None, weights[number][None], *rest)
            else:
                outputs.append(out)
        return outputs
    for number, layer in enumerate(layers):
        if number == len(norms):  # no norm follows this layer, so no consumer would compute its bias's gradient
            if plain:
                outputs.append(_apply(_Linear, *_in_type(x, layer.weight, layer.bias), products_of(layer)))
            else:
                outputs.append(layer(x))
        else:
            outputs += _apply(_Rotated, *linear(layer, x), weights[number][None], *rest)
    return outputs
