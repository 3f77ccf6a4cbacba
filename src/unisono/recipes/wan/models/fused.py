"""Parts of a Wan block with backward passes of their own: norms, gates, turns and linear layers.

The same mathematics as diffusers' modules, cut differently: what a backward pass adds up over all tokens is added up
where the numbers are anyway, and gradients that meet do so in one kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from unisono.recipes.wan.models import operations

_ONES = 16  # rows: fewer are no faster for a matrix product


class _Normed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
        _, y, mean, rstd = operations.norm(x, None, None, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return x.view_as(x), y

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dy: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        dx, _, sums = operations.norm_backward(dh, dy, x, None, None, weight, mean, rstd)
        return dx, sums[0], sums[1], None


class _Added(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, o: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Any:
        h, y, mean, rstd = operations.norm(x, o, gate, weight, bias, eps)
        ctx.gated, ctx.type = gate is not None, o.dtype
        ctx.save_for_backward(h, weight, mean, rstd, *((o, gate) if gate is not None else ()))
        return h, y

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dy: Tensor) -> Any:
        h, weight, mean, rstd, *more = ctx.saved_tensors
        o, gate = more if ctx.gated else (None, None)
        dx, do, sums = operations.norm_backward(dh, dy, h, o, gate, weight, mean, rstd)
        if ctx.gated:
            return dx, do, sums[2], sums[0], sums[1], None
        return dx, dx.to(ctx.type), None, sums[0], sums[1], None


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, o: Tensor, gate: Tensor) -> Any:
        ctx.save_for_backward(o, gate)
        rows = (len(gate), -1, x.shape[-1])
        return (x.float().view(rows) + o.float().view(rows) * gate[:, None]).view(x.shape).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> Any:
        return dh, *operations.gate_backward(dh, *ctx.saved_tensors)


class _Turned(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cosine: Any, sine: Any, head: int, eps: float) -> Any:
        y, rstd = operations.turn(x, weight, cosine, sine, head, eps)
        ctx.turned, ctx.head = cosine is not None, head
        ctx.save_for_backward(x, weight, rstd, *((cosine, sine) if cosine is not None else ()))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, rstd, *more = ctx.saved_tensors
        cosine, sine = more if ctx.turned else (None, None)
        dx, summed = operations.turn_backward(dy, x, weight, cosine, sine, rstd, ctx.head)
        return dx, summed.to(weight.dtype), None, None, None, None


class _Linear(Function):
    """Its bias gradient is a matrix product: the compiler's own sums over tokens are slow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = dy.flatten(0, -2)
        summed = (rows.new_ones(_ONES, len(rows)) @ rows)[0]
        return (rows @ weight).view(x.shape), rows.t() @ x.flatten(0, -2), summed


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


def _in_type(layer: Any, x: Tensor) -> list[Tensor]:
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return [tensor.to(dtype) for tensor in (x, layer.weight, layer.bias)]


def _apply(function: Any, *given: Any) -> Any:
    return function.apply(*given)


def linear(layer: Any, x: Tensor) -> Tensor:
    """What the layer says."""
    return _apply(_Linear, *_in_type(layer, x)) if _is_plain(layer) else layer(x)  # type: ignore[no-any-return]


def linear_gelu(layer: Any, x: Tensor) -> Tensor:
    """GELU of what the layer says."""
    if _is_plain(layer):
        return _apply(_LinearGelu, *_in_type(layer, x))  # type: ignore[no-any-return]
    return F.gelu(layer(x), approximate="tanh")


def normed(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, and layer_norm(x) · weight + bias; weight and bias are [groups, width]."""
    return _apply(_Normed, x, weight, bias, eps)  # type: ignore[no-any-return]


def added_and_normed(
    x: Tensor, o: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """h = x + o · gate, and layer_norm(h) · weight + bias."""
    return _apply(_Added, x, o, gate, weight, bias, eps)  # type: ignore[no-any-return]


def gated(x: Tensor, o: Tensor, gate: Tensor) -> Tensor:
    """x + o · gate."""
    return _apply(_Gated, x, o, gate)  # type: ignore[no-any-return]


def turned(x: Tensor, weight: Tensor, angles: Any, head: int, eps: float) -> Tensor:
    """rms_norm(x) · weight, each head turned by the angles of its token: (cosine, sine), each [tokens, head]."""
    return _apply(_Turned, x, weight, *(angles or (None, None)), head, eps)  # type: ignore[no-any-return]
