"""A Wan block that stores little for the backward pass, which recomputes what is cheap, one tensor at a time.

Each autograd function below covers the operations between two tensors that are worth storing, and its backward pass
recomputes the other tensors from these. Stored numbers per token, for a block of width d with inner width f:

    the fast block                   17 d + 2 f, and a copy of all weights in 16 bits
    selective                        10 d + f: the results of attention and of matrix products, and the residual stream
    selective, with `products`        6 d: also recomputes the products before attention and before GELU
    recomputed as a whole             1 d

Most recomputed tensors cost only a write, because a kernel of the backward pass has already loaded their inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from unisono.recipes.wan.models.kernels import again, fused, operations
from unisono.recipes.wan.models.kernels.attention import kernel_name
from unisono.recipes.wan.models.kernels.pieces import multiprocessors, num_pieces, possible_pieces

_ITSELF = ((slice(0, 3), slice(0, 2)),)  # self-attention: one product for q, k and v; norms for q and k
_TEXT = ((slice(0, 1), slice(0, 1)), (slice(1, 3), slice(1, 2)))  # cross-attention: a product for q, one for k and v


def forward(block: Any, x: Tensor, text: Tensor, time: Tensor, angles: Any, *, products: bool) -> Tensor:
    """Returns the block's output; `products` also recomputes the matrix products before attention and before GELU."""
    shift, scale, gate, late_shift, late_scale, late_gate = (block.scale_shift_table + time.float()).unbind(1)
    modulation = (1 + scale, shift, block.norm1.eps)
    rotation = tuple(part.flatten(0, -2) for part in angles[:2])
    x, out = _attention(block.attn1, products, (x, None, None, *modulation, None), None, rotation)
    out, bias_of_out = _linear(block.attn1.to_out[0], out)
    weight, bias = (part.float().expand(len(gate), -1) for part in (block.norm2.weight, block.norm2.bias))
    summed = (x, out, gate, weight, bias, block.norm2.eps, bias_of_out)
    x, out = _attention(block.attn2, products, summed, text, (None, None))
    out, bias_of_out = _linear(block.attn2.to_out[0], out)
    summed = (x, out, None, 1 + late_scale, late_shift, block.norm3.eps, bias_of_out)
    widen, narrow = block.ffn.net[0].proj, block.ffn.net[2]
    layers = (widen.weight, widen.bias, narrow.weight, narrow.bias.detach())
    x, out = fused._apply(_FeedForward, (products, fused._type_for(x)), *summed, *layers)
    return fused.gated(x, out, late_gate, narrow.bias)


def _attention(attention: Any, products: bool, summed: tuple[Any, ...], text: Tensor | None, rotation: Any) -> Any:
    """Returns the residual stream and the self- or cross-attention; `summed` holds `operations.norm`'s arguments."""
    x, heads = summed[0], attention.heads
    kernel = kernel_name(attention.processor._attention_backend) or "auto"
    pieces = 1 if text is None else num_pieces(x, possible_pieces(heads, text.shape[1], multiprocessors()))
    plan = (products, fused._type_for(x), attention.norm_q.eps, heads, kernel, pieces)
    layers = (attention.to_q, attention.to_k, attention.to_v)
    norms = torch.stack([attention.norm_q.weight, attention.norm_k.weight])
    weights = (*(layer.weight for layer in layers), *(layer.bias for layer in layers))
    return fused._apply(_Attention, plan, *summed, text, *rotation, norms, *weights)


def _linear(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the layer's output, and its bias, whose gradient the consumer of the output must compute."""
    return fused._apply(_Linear, x, layer.weight, layer.bias.detach()), layer.bias


class _Attention(Function):
    """Returns h = x + o · gate, and the self-attention of norm(h) or its cross-attention to the text."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: tuple[Any, ...],
        x: Tensor,
        o: Any,
        gate: Any,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        made: Any,
        text: Any,
        cosine: Any,
        sine: Any,
        norms: Tensor,
        *layers: Tensor,
    ) -> Any:
        products, dtype, norm_eps, heads, kernel, pieces = ctx.plan = plan
        h, y, mean, rstd = operations.norm(x, o, gate, weight, bias, eps)
        raw = [
            F.linear(source.to(dtype), *(_joined(part, dtype) for part in of_group))
            for source, of_group in zip((y, text), _layers_of(layers, text), strict=False)
        ]
        parts, _ = _rotated(operations.rotate, raw, norms, cosine, sine, heads, norm_eps)
        out, logarithms = again.attend(*parts, heads, kernel, pieces)
        ctx.eps, ctx.type_of_o, ctx.type_of_made = eps, fused._type(o), fused._type(made)
        residual = (h, None, None) if o is not None and gate is None else (x, o, gate)
        stored = () if products else raw
        inputs = (weight, bias, mean, rstd, text, cosine, sine, norms)
        _save(ctx, *residual, *inputs, out, logarithms, *layers, *stored)
        return x.view_as(x) if o is None else h, out

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dout: Tensor) -> Any:
        products, dtype, norm_eps, heads, kernel, pieces = ctx.plan
        saved = _saved(ctx)
        (x, o, gate, weight, bias, mean, rstd, text, cosine, sine, norms, out, logarithms), saved = (
            saved[:13],
            saved[13:],
        )
        layers, raw = saved[:6], saved[6:]
        of_groups = _layers_of(layers, text)
        if products:
            y = again.norm_again(x, o, gate, weight, bias, ctx.eps)
            raw = [
                again.linear_again(source.to(dtype), *(_joined_again(part, dtype) for part in of_group))
                for source, of_group in zip((y, text), of_groups, strict=False)
            ]
        parts, scales = _rotated(again.rotate_again, raw, norms, cosine, sine, heads, norm_eps)
        dparts = again.attend_backward(dout, *parts, out, logarithms, heads, kernel, pieces)
        del parts
        rows, dsources, dnorms, dbiases = [], [], [], []
        for number, (members, normed) in enumerate(_groups(text)):
            inside = (raw[number], norms[normed], cosine, sine, scales[number], norms.shape[1] // heads)
            draw, sums = operations.rotate_backward(list(dparts[members]), *inside)
            rows.append(draw.flatten(0, -2))
            dnorms.append(sums[: normed.stop - normed.start])
            dbiases += sums[normed.stop - normed.start :].unbind(0)
            needed = number == 0 or ctx.needs_input_grad[8]
            weights = of_groups[number][0]
            dsources.append((rows[-1] @ _joined_again(weights, dtype)).view(*draw.shape[:-1], -1) if needed else None)
        dx, do, sums, y = again.norm_backward_again(
            dh, dsources[0], x, o, gate, weight, bias, mean, rstd, ctx.type_of_made is not None
        )
        dweights = []
        for source, of_group in zip((y, text), rows, strict=False):
            dweight = of_group.t() @ source.to(dtype).flatten(0, -2)
            dweights += dweight.split(norms.shape[1])
        dlayers = [gradient.to(layer.dtype) for gradient, layer in zip((*dweights, *dbiases), layers, strict=True)]
        dtext = None if text is None or dsources[1] is None else dsources[1].to(text.dtype)
        dnorm = torch.cat(dnorms).to(norms.dtype)
        return None, *_of_norm(ctx, dx, do, gate, sums), dtext, None, None, dnorm, *dlayers


class _FeedForward(Function):
    """Returns h = x + o, and the feed-forward output for norm(h); the consumer computes its last bias's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: tuple[Any, ...],
        x: Tensor,
        o: Tensor,
        gate: None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        made: Any,
        *layers: Tensor,
    ) -> Any:
        products, dtype = ctx.plan = plan
        h, y, mean, rstd = operations.norm(x, o, gate, weight, bias, eps)
        widen, widen_bias, narrow, narrow_bias = (layer.to(dtype) for layer in layers)
        inner = F.linear(y.to(dtype), widen, widen_bias)
        out = F.linear(F.gelu(inner, approximate="tanh"), narrow, narrow_bias)
        ctx.eps, ctx.type_of_o, ctx.type_of_made = eps, fused._type(o), fused._type(made)
        _save(ctx, h, weight, bias, mean, rstd, *layers[:3], *(() if products else (inner,)))
        return h, out

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dout: Tensor) -> Any:
        products, dtype = ctx.plan
        h, weight, bias, mean, rstd, widen, widen_bias, narrow, *stored = _saved(ctx)
        rows = dout.flatten(0, -2)
        dgelu = (rows @ _joined_again([narrow], dtype)).view(*dout.shape[:-1], -1)
        widen_now = _joined_again([widen], dtype)
        if products:
            y = again.norm_again(h, None, None, weight, bias, ctx.eps)
            inner = again.linear_again(y.to(dtype), widen_now, _joined_again([widen_bias], dtype))
        else:
            (inner,) = stored
        dinner, dwiden_bias, gelu = again.gelu_backward_again(dgelu, inner)
        dnarrow = rows.t() @ gelu.flatten(0, -2)
        rows = dinner.flatten(0, -2)
        dy = (rows @ widen_now).view(h.shape)
        dx, do, sums, y = again.norm_backward_again(
            dh, dy, h, None, None, weight, bias, mean, rstd, ctx.type_of_made is not None
        )
        dwiden = rows.t() @ y.to(dtype).flatten(0, -2)
        dlayers = (dwiden.to(widen.dtype), dwiden_bias.to(widen_bias.dtype), dnarrow.to(narrow.dtype), None)
        return None, *_of_norm(ctx, dx, do, None, sums), *dlayers


class _Linear(Function):
    """A linear layer that saves its float32 weight, which is in memory anyway, instead of a 16-bit copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = dy.flatten(0, -2)
        dx = (rows @ _joined_again([weight], x.dtype)).view(x.shape)
        return dx, (rows.t() @ x.flatten(0, -2)).to(weight.dtype), None


def _of_norm(ctx: Any, dx: Tensor, do: Tensor, gate: Any, sums: Tensor) -> tuple[Any, ...]:
    """Returns the gradients of `operations.norm`'s inputs x, o, gate, weight, bias and eps, and of the bias `made`."""
    made = sums[-1].sum(0).to(ctx.type_of_made) if ctx.type_of_made else None
    if gate is not None:
        return dx, do, sums[2], sums[0], sums[1], None, made
    return dx, dx.to(ctx.type_of_o) if ctx.type_of_o else None, None, sums[0], sums[1], None, made


def _groups(text: Tensor | None) -> tuple[tuple[slice, slice], ...]:
    """Returns, for each matrix product, its layers among q, k and v, and its norms among those of q and k."""
    return _ITSELF if text is None else _TEXT


def _layers_of(layers: Sequence[Tensor], text: Tensor | None) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Returns each matrix product's weights and biases; `layers` are the weights of q, k and v, then their biases."""
    return [(list(layers[:3][members]), list(layers[3:][members])) for members, _ in _groups(text)]


def _rotated(
    rotate: Any, raw: Sequence[Tensor], norms: Tensor, cosine: Any, sine: Any, heads: int, eps: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Computes query, key and value from the results of the products; also returns 1 / root mean square per norm."""
    parts, scales, width = [], [], norms.shape[1]
    for of_group, (_, normed) in zip(raw, _ITSELF if len(raw) == 1 else _TEXT, strict=True):
        y, scale = rotate(of_group, norms[normed], cosine, sine, width // heads, eps)
        parts += y.unbind(0)
        if of_group.shape[-1] > len(y) * width:
            parts.append(of_group[..., len(y) * width :])
        scales.append(scale)
    return parts, scales


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    copies = [part.to(dtype) for part in parts]
    return torch.cat(copies) if len(copies) > 1 else copies[0]


def _joined_again(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if len(parts) == 1 and parts[0].dtype == dtype:
        return parts[0]
    return again.cast_again(list(parts), dtype)  # type: ignore[no-any-return]


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.present = tuple(tensor is not None for tensor in tensors)
    ctx.save_for_backward(*(tensor for tensor in tensors if tensor is not None))


def _saved(ctx: Any) -> list[Any]:
    saved = iter(ctx.saved_tensors)
    return [next(saved) if present else None for present in ctx.present]
