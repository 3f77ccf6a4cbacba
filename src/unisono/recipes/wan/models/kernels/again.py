"""Operations for the backward pass that recompute what the forward pass did not store; registered with PyTorch.

Even an operation that computes the same as one of the forward pass has its own name: torch.compile would otherwise
merge the two operations into one and store its result.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from unisono.recipes.wan.models.kernels import operations
from unisono.recipes.wan.models.kernels.attention import KERNELS
from unisono.recipes.wan.models.kernels.operations import _operation, _shapes_of

_aten = torch.ops.aten
_NORM = "Tensor x, Tensor? o, Tensor? gate, Tensor weight, Tensor bias, float eps"
_ROTATE = "Tensor x, Tensor weight, Tensor? cosine, Tensor? sine, int head, float eps"


@_operation(_NORM, "Tensor", by_kernel=False)
def norm_again(x: Tensor, o: Any, gate: Any, weight: Tensor, bias: Tensor, eps: float) -> Any:
    """Computes the layer norm of x + o · gate, as `norm` does."""
    return operations.norm(x, o, gate, weight, bias, eps)[1]


@_shapes_of("norm_again")  # type: ignore[untyped-decorator]
def _(x: Tensor, o: Any, gate: Any, weight: Tensor, bias: Tensor, eps: float) -> Any:
    return x.new_empty(x.shape)


@_operation(
    "Tensor dh, Tensor dy, Tensor x, Tensor? o, Tensor? gate, Tensor weight, Tensor bias, Tensor mean, Tensor rstd, "
    "bool added",
    "(Tensor, Tensor, Tensor, Tensor)",
)
def norm_backward_again(
    dh: Tensor,
    dy: Tensor,
    x: Tensor,
    o: Any,
    gate: Any,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    added: bool,
) -> Any:
    """Like `norm_backward` with h = x + o · gate (o and gate: both or neither); also returns the norm's output."""
    groups = len(weight)
    h = x
    if gate is not None:
        rows = (part.float().reshape(groups, -1, x.shape[-1]) for part in (x, o))
        h = (next(rows) + next(rows) * gate[:, None]).view(x.shape).to(x.dtype)
    dx, do, sums = operations.norm_backward(dh, dy, h, o, gate, weight, mean, rstd, added)
    normed = (h.float().reshape(groups, -1, x.shape[-1]) - mean.view(groups, -1, 1)) * rstd.view(groups, -1, 1)
    y = normed * weight[:, None] + bias[:, None]
    return dx, do, sums, y.view(x.shape).to(x.dtype)


@_shapes_of("norm_backward_again")  # type: ignore[untyped-decorator]
def _(
    dh: Tensor,
    dy: Tensor,
    x: Tensor,
    o: Any,
    gate: Any,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    added: bool,
) -> Any:
    gated = gate is not None
    sums = x.new_empty(2 + gated + added, *weight.shape, dtype=torch.float32)
    return x.new_empty(x.shape), o.new_empty(o.shape) if gated else x.new_empty(0), sums, x.new_empty(x.shape)


@_operation(_ROTATE, "(Tensor, Tensor)", by_kernel=False)
def rotate_again(x: Tensor, weight: Tensor, cosine: Any, sine: Any, head: int, eps: float) -> Any:
    """Computes the same as `rotate`."""
    return operations.rotate(x, weight, cosine, sine, head, eps)


@_shapes_of("rotate_again")  # type: ignore[untyped-decorator]
def _(x: Tensor, weight: Tensor, cosine: Any, sine: Any, head: int, eps: float) -> Any:
    parts, width = weight.shape
    y = x.new_empty(parts, *x.shape[:-1], width)
    return y, x.new_empty(parts, x.numel() // x.shape[-1], dtype=torch.float32)


@_operation("Tensor dy, Tensor x", "(Tensor, Tensor, Tensor)")
def gelu_backward_again(dy: Tensor, x: Tensor) -> Any:
    """Returns the gradient with respect to x of gelu(x), its sum over tokens, and gelu(x)."""
    return *operations.gelu_backward(dy, x), F.gelu(x, approximate="tanh")


@_shapes_of("gelu_backward_again")  # type: ignore[untyped-decorator]
def _(dy: Tensor, x: Tensor) -> Any:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1], dtype=torch.float32), x.new_empty(x.shape)


@_operation("Tensor[] parts, ScalarType dtype", "Tensor", by_kernel=False)
def cast_again(parts: list[Tensor], dtype: torch.dtype) -> Any:
    """Concatenates the matrices along their rows, in another dtype."""
    whole = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=dtype)
    begin = 0
    for part in parts:
        whole[begin : begin + len(part)] = part
        begin += len(part)
    return whole


@_shapes_of("cast_again")  # type: ignore[untyped-decorator]
def _(parts: list[Tensor], dtype: torch.dtype) -> Any:
    return parts[0].new_empty(sum(part.shape[0] for part in parts), *parts[0].shape[1:], dtype=dtype)


@_operation("Tensor x, Tensor weight, Tensor bias", "Tensor", by_kernel=False)
def linear_again(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """Computes x · weightᵀ + bias."""
    return F.linear(x, weight, bias)


@_shapes_of("linear_again")  # type: ignore[untyped-decorator]
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@_operation(
    "Tensor query, Tensor key, Tensor value, int heads, str kernel, int pieces", "(Tensor, Tensor)", by_kernel=False
)
def attend(query: Tensor, key: Tensor, value: Tensor, heads: int, kernel: str, pieces: int) -> Any:
    """Computes attention of [batch, tokens, width]; also returns each row's log-sum-exp for `attend_backward`.

    `pieces`: number of samples to split the queries of a single sample into.
    """
    q, k, v = _by_head(query, key, value, heads, pieces)
    chosen, logarithms = _chosen(q, k, v, kernel), None
    if chosen == SDPBackend.CUDNN_ATTENTION:
        out, logarithms = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[:2]
    elif chosen == SDPBackend.FLASH_ATTENTION and q.is_cuda:
        out, logarithms = _aten._scaled_dot_product_flash_attention(q, k, v)[:2]
    elif chosen == SDPBackend.FLASH_ATTENTION:
        out, logarithms = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    else:
        out = _plain(q, k, v, chosen)
    shape = (len(query), heads, query.shape[1])
    logarithms = _logarithms(query, shape) if logarithms is None else logarithms.contiguous().view(shape)
    return _tokens_first(out, query), logarithms


@_shapes_of("attend")  # type: ignore[untyped-decorator]
def _(query: Tensor, key: Tensor, value: Tensor, heads: int, kernel: str, pieces: int) -> Any:
    return query.new_empty(query.shape), _logarithms(query, (query.shape[0], heads, query.shape[1]))


@_operation(
    "Tensor dout, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logarithms, int heads, str kernel, "
    "int pieces",
    "(Tensor, Tensor, Tensor)",
    by_kernel=False,
)
def attend_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logarithms: Tensor,
    heads: int,
    kernel: str,
    pieces: int,
) -> Any:
    """Returns the gradients of query, key and value."""
    q, k, v = _by_head(query, key, value, heads, pieces)
    given, result = (_in_heads(part.contiguous(), heads, pieces) for part in (dout, out))
    rows = logarithms.view(len(q), heads, q.shape[2])
    chosen, plain = _chosen(q, k, v, kernel), (None, None, q.shape[2], k.shape[2], 0.0, False)
    if chosen == SDPBackend.CUDNN_ATTENTION:
        unused = [q.new_zeros((), dtype=torch.int64) for _ in range(2)]  # the random state of dropout
        inside = (given, q, k, v, result, rows[..., None], *unused, None, *plain)
        gradients = _aten._scaled_dot_product_cudnn_attention_backward(*inside)
    elif chosen == SDPBackend.FLASH_ATTENTION and q.is_cuda:
        unused = [torch.zeros(size, dtype=torch.uint64, device=q.device) for size in (2, ())]  # dropout's random state
        gradients = _aten._scaled_dot_product_flash_attention_backward(given, q, k, v, result, rows, *plain, *unused)
    elif chosen == SDPBackend.FLASH_ATTENTION:
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(given, q, k, v, result, rows, 0.0, False)
    else:
        with torch.enable_grad():
            q, k, v = leaves = [part.detach().requires_grad_() for part in (q, k, v)]
            gradients = torch.autograd.grad(_plain(q, k, v, chosen), leaves, given)
    dq, *others = gradients
    if pieces > 1:
        others = [gradient.sum(0, keepdim=True) for gradient in others]
    return _tokens_first(dq, query), *(_tokens_first(gradient, key) for gradient in others)


@_shapes_of("attend_backward")  # type: ignore[untyped-decorator]
def _(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logarithms: Tensor,
    heads: int,
    kernel: str,
    pieces: int,
) -> Any:
    return tuple(part.new_empty(part.shape) for part in (query, key, value))


def _logarithms(query: Tensor, shape: tuple[int, ...]) -> Tensor:
    return query.new_empty(shape, dtype=torch.promote_types(query.dtype, torch.float32))


def _in_heads(x: Tensor, heads: int, pieces: int = 1) -> Tensor:
    """Returns a view [batch, heads, tokens, width of a head]."""
    return x.reshape(len(x) * pieces, x.shape[1] // pieces, heads, -1).transpose(1, 2)


def _by_head(query: Tensor, key: Tensor, value: Tensor, heads: int, pieces: int) -> list[Tensor]:
    others = [_in_heads(part, heads) for part in (key, value)]
    return [_in_heads(query, heads, pieces), *(part.repeat(pieces, 1, 1, 1) if pieces > 1 else part for part in others)]


def _tokens_first(x: Tensor, like: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(like.shape).contiguous()


def _plain(query: Tensor, key: Tensor, value: Tensor, chosen: SDPBackend) -> Tensor:
    """Computes attention with a kernel that returns no log-sum-exp; the backward pass therefore runs it again."""
    by_name = chosen in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION)
    with sdpa_kernel(chosen) if by_name else nullcontext():
        return F.scaled_dot_product_attention(query, key, value)


def _chosen(query: Tensor, key: Tensor, value: Tensor, kernel: str) -> SDPBackend:
    """Returns the kernel with this name, or torch's choice, which is the same in forward and backward."""
    backend = KERNELS.get(kernel)
    if backend is None:
        # requires_grad_, because some kernels support fewer shapes when gradients are needed.
        backend = SDPBackend(torch._fused_sdp_choice(query.detach().requires_grad_(), key, value))
    # These kernels need a width that is a multiple of 8; torch would pad heads of other widths before it calls them.
    stored = backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
    if stored and query.is_cuda and query.shape[-1] % 8:
        return SDPBackend.ERROR
    return backend
