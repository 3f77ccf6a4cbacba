"""What lies between the matrix products of a Wan block, forwards and backwards, as operations that torch knows.

Here they are plain torch, which runs on a CPU and which the kernels are tested against; on a GPU the function of the
same name in `kernels.py` runs instead. torch.compile leaves them as they are.

Rows of tokens come in groups: those of a group share weight, bias and gate, which are [groups, width].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The library by hand rather than `custom_op`, which asks more questions at each call: here the CPU must keep ahead of a
# GPU that needs 30 µs for such an operation.
_LIBRARY = torch.library.Library("unisono", "FRAGMENT")  # type: ignore[no-untyped-call]


def _operation(inputs: str, outputs: str) -> Callable[[Callable[..., Any]], Any]:
    def made(plain: Callable[..., Any]) -> Any:
        name = plain.__name__
        _LIBRARY.define(f"wan_{name}({inputs}) -> {outputs}", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        for device, compute in (("CPU", plain), ("CUDA", _by_kernel(name))):
            _LIBRARY.impl(f"wan_{name}", _in_one_piece(compute), device)  # type: ignore[no-untyped-call]
        return getattr(torch.ops.unisono, f"wan_{name}").default

    return made


def _in_one_piece(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Given tensors that lie in one piece, as the kernels read them: then what comes back does too, as promised."""

    def computed(*given: Any) -> Any:
        return compute(*(part.contiguous() if isinstance(part, Tensor) else part for part in given))

    return computed


def _by_kernel(name: str) -> Callable[..., Any]:
    def compute(*given: Any) -> Any:
        from unisono.recipes.wan.models import kernels

        if torch.cuda.current_device() == given[0].get_device():
            return getattr(kernels, name)(*given)
        with torch.cuda.device(given[0].device):  # Triton launches on the current one
            return getattr(kernels, name)(*given)

    return compute


def _shapes_of(name: str) -> Any:
    return torch.library.register_fake(f"unisono::wan_{name}")


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[groups, rows, width] in 32 bit."""
    return x.float().reshape(groups, -1, x.shape[-1])


def _per_token(x: Tensor) -> Tensor:
    return x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


@_operation(
    "Tensor x, Tensor? o, Tensor? gate, Tensor weight, Tensor bias, float eps", "(Tensor, Tensor, Tensor, Tensor)"
)
def norm(x: Tensor, o: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Any:
    """h = x + o · gate (nothing, without o), its layer norm · weight + bias, its mean and 1 / standard deviation."""
    groups, h = len(weight), x
    if o is not None:
        added = _grouped(o, groups) * (1 if gate is None else gate[:, None])
        h = (_grouped(x, groups) + added).view(x.shape).to(x.dtype)
    rows = _grouped(h, groups)
    mean = rows.mean(-1, keepdim=True)
    rstd = ((rows - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    y = (rows - mean) * rstd * weight[:, None] + bias[:, None]
    return (x.new_empty(0) if o is None else h), y.view(x.shape).to(x.dtype), mean.flatten(), rstd.flatten()


@_shapes_of("norm")  # type: ignore[untyped-decorator]
def _(x: Tensor, o: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Any:
    return x.new_empty(0 if o is None else x.shape), x.new_empty(x.shape), _per_token(x), _per_token(x)


@_operation(
    "Tensor dh, Tensor dy, Tensor h, Tensor? o, Tensor? gate, Tensor weight, Tensor mean, Tensor rstd",
    "(Tensor, Tensor, Tensor)",
)
def norm_backward(
    dh: Tensor, dy: Tensor, h: Tensor, o: Any, gate: Any, weight: Tensor, mean: Tensor, rstd: Tensor
) -> Any:
    """Gradients of x, of o (nothing, without gate: then it is that of x), and of [weight, bias(, gate)]."""
    groups = len(weight)
    scale = rstd.view(groups, -1, 1)
    normed = (_grouped(h, groups) - mean.view(groups, -1, 1)) * scale
    gradient = _grouped(dy, groups)
    sums = [(gradient * normed).sum(1), gradient.sum(1)]
    gradient = gradient * weight[:, None]
    along, middle = (part.mean(-1, keepdim=True) for part in (gradient * normed, gradient))
    dx = (_grouped(dh, groups) + scale * (gradient - middle - normed * along)).view(h.shape).to(h.dtype)
    if gate is None:
        return dx, h.new_empty(0), torch.stack(sums)
    sums.append((_grouped(dx, groups) * _grouped(o, groups)).sum(1))
    return dx, (_grouped(dx, groups) * gate[:, None]).view(o.shape).to(o.dtype), torch.stack(sums)


@_shapes_of("norm_backward")  # type: ignore[untyped-decorator]
def _(dh: Tensor, dy: Tensor, h: Tensor, o: Any, gate: Any, weight: Tensor, mean: Tensor, rstd: Tensor) -> Any:
    gated = gate is not None
    sums = h.new_empty(3 if gated else 2, *weight.shape, dtype=torch.float32)
    return h.new_empty(h.shape), o.new_empty(o.shape) if gated else h.new_empty(0), sums


@_operation("Tensor dh, Tensor o, Tensor gate", "(Tensor, Tensor)")
def gate_backward(dh: Tensor, o: Tensor, gate: Tensor) -> Any:
    """Gradients of o and of gate in x + o · gate."""
    total = _grouped(dh, len(gate))
    return (total * gate[:, None]).view(o.shape).to(o.dtype), (total * _grouped(o, len(gate))).sum(1)


@_shapes_of("gate_backward")  # type: ignore[untyped-decorator]
def _(dh: Tensor, o: Tensor, gate: Tensor) -> Any:
    return o.new_empty(o.shape), gate.new_empty(gate.shape, dtype=torch.float32)


@_operation("Tensor x, Tensor weight, Tensor? cosine, Tensor? sine, int head, float eps", "(Tensor, Tensor)")
def turn(x: Tensor, weight: Tensor, cosine: Tensor | None, sine: Tensor | None, head: int, eps: float) -> Any:
    """RMS norm · weight, each head turned by its token's angles (if any); with 1 / root mean square."""
    rstd = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    y = x.float() * rstd * weight
    if cosine is not None and sine is not None:
        y = _turned(y, cosine, sine, head)
    return y.to(x.dtype), rstd.flatten()


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, head: int) -> Tensor:
    left, right = x.reshape(*x.shape[:-1], -1, head // 2, 2).unbind(-1)
    c, s = cosine[:, None, 0::2], sine[:, None, 1::2]
    return torch.stack((left * c - right * s, left * s + right * c), -1).flatten(-3)


@_shapes_of("turn")  # type: ignore[untyped-decorator]
def _(x: Tensor, weight: Tensor, cosine: Tensor | None, sine: Tensor | None, head: int, eps: float) -> Any:
    return x.new_empty(x.shape), _per_token(x)


@_operation(
    "Tensor dy, Tensor x, Tensor weight, Tensor? cosine, Tensor? sine, Tensor rstd, int head", "(Tensor, Tensor)"
)
def turn_backward(dy: Tensor, x: Tensor, weight: Tensor, cosine: Any, sine: Any, rstd: Tensor, head: int) -> Any:
    """Gradients of x and of weight."""
    gradient, scale = dy.float(), rstd.view(*x.shape[:-1], 1)
    if cosine is not None and sine is not None:
        gradient = _turned(gradient, cosine, -sine, head)
    normed = x.float() * scale
    summed = (gradient * normed).flatten(0, -2).sum(0)
    gradient = gradient * weight
    dx = scale * (gradient - normed * (gradient * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), summed


@_shapes_of("turn_backward")  # type: ignore[untyped-decorator]
def _(dy: Tensor, x: Tensor, weight: Tensor, cosine: Any, sine: Any, rstd: Tensor, head: int) -> Any:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1], dtype=torch.float32)


@_operation("Tensor dy, Tensor x", "(Tensor, Tensor)")
def gelu_backward(dy: Tensor, x: Tensor) -> Any:
    """Gradient of x in gelu(x), and its sum over tokens."""
    dx = torch.ops.aten.gelu_backward(dy, x, approximate="tanh")
    return dx, dx.float().flatten(0, -2).sum(0)


@_shapes_of("gelu_backward")  # type: ignore[untyped-decorator]
def _(dy: Tensor, x: Tensor) -> Any:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1], dtype=torch.float32)
