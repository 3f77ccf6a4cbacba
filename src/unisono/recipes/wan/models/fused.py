"""Parts of a Wan block with backward passes of their own: norms, gates, turns and linear layers.

The same mathematics as diffusers' modules, cut differently: what a backward pass adds up over all tokens is added up
where the numbers are anyway, and gradients that meet do so in one kernel. So the gradient of a layer's bias comes from
whoever uses what the layer says: that one gets the bias too (`made`), and the layer itself leaves it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from unisono.recipes.wan.models import operations

_ONES = 16  # rows: fewer are no faster for a matrix product


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


class _Turned(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, made: Any, weight: Tensor, cosine: Any, sine: Any, head: int, eps: float) -> Any:
        y, rstd = operations.turn(x, weight, cosine, sine, head, eps)
        ctx.turned, ctx.head, ctx.made = cosine is not None, head, _type(made)
        ctx.save_for_backward(x, weight, rstd, *((cosine, sine) if cosine is not None else ()))
        rest = x[..., weight.numel() :]
        return (*y.unbind(0), rest) if rest.shape[-1] else y.unbind(0)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        x, weight, rstd, *more = ctx.saved_tensors
        cosine, sine = more if ctx.turned else (None, None)
        dx, sums = operations.turn_backward(list(dy), x, weight, cosine, sine, rstd, ctx.head)
        made = sums[len(weight) :].flatten().to(ctx.made) if ctx.made else None
        return dx, made, sums[: len(weight)].to(weight.dtype), None, None, None, None


class _Linear(Function):
    """The bias gets its gradient here only if nobody else has the numbers: the compiler's sums over tokens are slow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = dy.flatten(0, -2)
        dx = (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        summed = (rows.new_ones(_ONES, len(rows)) @ rows)[0] if ctx.needs_input_grad[2] else None
        return dx, rows.t() @ x.flatten(0, -2), summed


class _LinearGelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        inner = F.linear(x, weight, bias)
        ctx.save_for_backward(x, weight, inner)
        return F.gelu(inner, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, inner = ctx.saved_tensors
        gradient, summed = operations.gelu_backward(dy, inner)
        rows = gradient.flatten(0, -2)
        return (rows @ weight).view(x.shape), rows.t() @ x.flatten(0, -2), summed.to(dy.dtype)


def _is_plain(layer: Any) -> bool:
    """Whether a layer is all trained and nothing more: one with an adapter, or frozen, is better asked itself."""
    return (
        type(layer) is nn.Linear and layer.bias is not None and layer.bias.requires_grad and layer.weight.requires_grad
    )


def _type_for(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _in_type(x: Tensor, *given: Tensor) -> list[Tensor]:
    return [tensor.to(_type_for(x)) for tensor in (x, *given)]


def _apply(function: Any, *given: Any) -> Any:
    return function.apply(*given)


def linear(layer: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the layer says; and its bias, if who uses that gives the bias its gradient (`made`)."""
    if not _is_plain(layer):
        return layer(x), None
    return _apply(_Linear, *_in_type(x, layer.weight, layer.bias.detach())), layer.bias


def linear_gelu(layer: Any, x: Tensor) -> Tensor:
    """GELU of what the layer says."""
    if _is_plain(layer):
        return _apply(_LinearGelu, *_in_type(x, layer.weight, layer.bias))  # type: ignore[no-any-return]
    return F.gelu(layer(x), approximate="tanh")


def normed(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, and layer_norm(x) · weight + bias; weight and bias are [groups, width]."""
    return _apply(_Normed, x, weight, bias, eps)  # type: ignore[no-any-return]


def added_and_normed(
    x: Tensor, o: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float, made: Tensor | None
) -> tuple[Tensor, Tensor]:
    """h = x + o · gate, and layer_norm(h) · weight + bias; `made` is the bias of the layer that made o."""
    return _apply(_Added, x, o, gate, weight, bias, eps, made)  # type: ignore[no-any-return]


def gated(x: Tensor, o: Tensor, gate: Tensor, made: Tensor | None) -> Tensor:
    """x + o · gate; `made` is the bias of the layer that made o."""
    return _apply(_Gated, x, o, gate, made)  # type: ignore[no-any-return]


def turned(layers: Sequence[Any], x: Tensor, norms: Sequence[Any], angles: Any, head: int) -> list[Tensor]:
    """What each layer says of x: those with a norm as rms_norm · weight, each head turned by the angles of its token.

    Angles are (cosine, sine), each [tokens, head]. Layers that are all trained are one matrix product, if their weights
    must be copied to another type anyhow: a copy is kept until the backward pass, where fsdp would have let go of them.
    """
    weights, rest = [norm.weight for norm in norms], (*(angles or (None, None)), head, norms[0].eps)
    plain = all(map(_is_plain, layers))
    if plain and all(layer.weight.dtype != _type_for(x) for layer in layers):
        weight, bias = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
        said = _apply(_Linear, *_in_type(x, weight, bias.detach()))
        return list(_apply(_Turned, said, bias, torch.stack(weights), *rest))
    found = []
    for number, layer in enumerate(layers):
        if number == len(norms):  # nothing is done to what it says, so nobody else has its bias
            found.append(_apply(_Linear, *_in_type(x, layer.weight, layer.bias)) if plain else layer(x))
        else:
            found += _apply(_Turned, *linear(layer, x), weights[number][None], *rest)
    return found
