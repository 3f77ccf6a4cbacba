"""The operations between the matrix products of a Wan block, forward and backward, registered with PyTorch.

The code in this module is plain PyTorch: it runs on a CPU and is the reference for the kernels. On a GPU, the function
of the same name in `triton_kernels.py` runs instead. torch.compile treats the operations as opaque.

A row is a token. Consecutive rows form groups; the rows of a group share weight, bias and gate, which are
[groups, width].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Uses torch.library directly, because `custom_op` has more overhead per call, and the CPU must launch operations faster
# than the GPU computes them: an operation takes about 30 µs.
_LIBRARY = torch.library.Library("unisono", "FRAGMENT")  # type: ignore[no-untyped-call]


def _operation(inputs: str, outputs: str, *, by_kernel: bool = True) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function as an operation.

    With `by_kernel=False`, the same PyTorch code also runs on a GPU, and arguments keep their memory layouts.
    """

    def made(plain: Callable[..., Any]) -> Any:
        name = plain.__name__
        _LIBRARY.define(f"wan_{name}({inputs}) -> {outputs}", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        for device, compute in (("CPU", plain), ("CUDA", _by_kernel(name) if by_kernel else plain)):
            implementation = _in_one_piece(compute) if by_kernel else compute
            _LIBRARY.impl(f"wan_{name}", implementation, device)  # type: ignore[no-untyped-call]
        return getattr(torch.ops.unisono, f"wan_{name}").default

    return made


def _in_one_piece(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Makes all tensor arguments contiguous, because the kernels require it; the results are then contiguous too."""

    def whole(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.contiguous()
        return list(map(whole, part)) if isinstance(part, list) else part

    return lambda *arguments: compute(*map(whole, arguments))


def _by_kernel(name: str) -> Callable[..., Any]:
    def compute(*arguments: Any) -> Any:
        launch = _kernel(name)
        device = (arguments[0] if isinstance(arguments[0], Tensor) else arguments[0][0]).device
        if torch.cuda.current_device() == device.index:
            return launch(*arguments)
        with torch.cuda.device(device):  # Triton launches on the current device
            return launch(*arguments)

    return compute


@cache
def _kernel(name: str) -> Any:
    from unisono.recipes.wan.models.kernels import triton_kernels as kernels

    return getattr(kernels, name)


def _shapes_of(name: str) -> Any:
    return torch.library.register_fake(f"unisono::wan_{name}")


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Reshapes x to [groups, rows, width] in float32."""
    return x.float().reshape(groups, -1, x.shape[-1])


def _per_token(x: Tensor) -> Tensor:
    return x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


@_operation(
    "Tensor x, Tensor? o, Tensor? gate, Tensor weight, Tensor bias, float eps", "(Tensor, Tensor, Tensor, Tensor)"
)
def norm(x: Tensor, o: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Any:
    """Returns h = x + o · gate (empty without o), layer_norm(h) · weight + bias, and h's mean and 1 / deviation."""
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
    "Tensor dh, Tensor dy, Tensor h, Tensor? o, Tensor? gate, Tensor weight, Tensor mean, Tensor rstd, bool added",
    "(Tensor, Tensor, Tensor)",
)
def norm_backward(
    dh: Tensor, dy: Tensor, h: Tensor, o: Any, gate: Any, weight: Tensor, mean: Tensor, rstd: Tensor, added: bool
) -> Any:
    """Returns the gradient of x, the gradient of o, and sums over tokens.

    Without a gate, the gradient of o is empty, because it equals the gradient of x. The sums are the gradients of
    weight and bias, that of gate (if there is a gate), and the gradient of o summed over tokens (if `added`).
    """
    groups = len(weight)
    scale = rstd.view(groups, -1, 1)
    normed = (_grouped(h, groups) - mean.view(groups, -1, 1)) * scale
    gradient = _grouped(dy, groups)
    sums = [(gradient * normed).sum(1), gradient.sum(1)]
    gradient = gradient * weight[:, None]
    along, middle = (part.mean(-1, keepdim=True) for part in (gradient * normed, gradient))
    dx = (_grouped(dh, groups) + scale * (gradient - middle - normed * along)).view(h.shape).to(h.dtype)
    do = h.new_empty(0)
    if gate is not None:
        sums.append((_grouped(dx, groups) * _grouped(o, groups)).sum(1))
        do = (_grouped(dx, groups) * gate[:, None]).view(o.shape).to(o.dtype)
    if added:
        sums.append(_grouped(dx if gate is None else do, groups).sum(1))
    return dx, do, torch.stack(sums)


@_shapes_of("norm_backward")  # type: ignore[untyped-decorator]
def _(
    dh: Tensor, dy: Tensor, h: Tensor, o: Any, gate: Any, weight: Tensor, mean: Tensor, rstd: Tensor, added: bool
) -> Any:
    gated = gate is not None
    sums = h.new_empty(2 + gated + added, *weight.shape, dtype=torch.float32)
    return h.new_empty(h.shape), o.new_empty(o.shape) if gated else h.new_empty(0), sums


@_operation("Tensor dh, Tensor o, Tensor gate", "(Tensor, Tensor)")
def gate_backward(dh: Tensor, o: Tensor, gate: Tensor) -> Any:
    """Returns the gradient of o in x + o · gate, and the gradients of gate and of o summed over tokens."""
    total = _grouped(dh, len(gate))
    do = (total * gate[:, None]).view(o.shape).to(o.dtype)
    return do, torch.stack([(total * _grouped(o, len(gate))).sum(1), _grouped(do, len(gate)).sum(1)])


@_shapes_of("gate_backward")  # type: ignore[untyped-decorator]
def _(dh: Tensor, o: Tensor, gate: Tensor) -> Any:
    return o.new_empty(o.shape), gate.new_empty(2, *gate.shape, dtype=torch.float32)


@_operation("Tensor x, Tensor weight, Tensor? cosine, Tensor? sine, int head, float eps", "(Tensor, Tensor)")
def rotate(x: Tensor, weight: Tensor, cosine: Tensor | None, sine: Tensor | None, head: int, eps: float) -> Any:
    """Returns, for each part of x, RMS norm · weight with the rotary embedding (if any), and 1 / root mean square.

    A row of x consists of parts next to each other, each as wide as a row of weight. There may be one part more than
    rows of weight; it is not changed.
    """
    parts = _parts(x, weight)[: len(weight)]
    rstd = torch.stack([(part.square().mean(-1, keepdim=True) + eps).rsqrt() for part in parts])
    y = torch.stack(parts) * rstd * weight.view(len(weight), *[1] * (x.ndim - 1), -1)
    if cosine is not None and sine is not None:
        y = _rotated(y, cosine, sine, head)
    return y.to(x.dtype), rstd.view(len(weight), -1)


def _parts(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x.float(), weight.shape[-1], -1)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor, head: int) -> Tensor:
    left, right = x.reshape(*x.shape[:-1], -1, head // 2, 2).unbind(-1)
    c, s = cosine[:, None, 0::2], sine[:, None, 1::2]
    return torch.stack((left * c - right * s, left * s + right * c), -1).flatten(-3)


@_shapes_of("rotate")  # type: ignore[untyped-decorator]
def _(x: Tensor, weight: Tensor, cosine: Tensor | None, sine: Tensor | None, head: int, eps: float) -> Any:
    parts, width = weight.shape
    y = x.new_empty(parts, *x.shape[:-1], width)
    return y, x.new_empty(parts, x.numel() // x.shape[-1], dtype=torch.float32)


@_operation(
    "Tensor[] dy, Tensor x, Tensor weight, Tensor? cosine, Tensor? sine, Tensor rstd, int head", "(Tensor, Tensor)"
)
def rotate_backward(
    dy: list[Tensor], x: Tensor, weight: Tensor, cosine: Any, sine: Any, rstd: Tensor, head: int
) -> Any:
    """Returns the gradient of x, and sums over tokens: the gradient of each weight, then of each part of x."""
    dx, sums = [], []
    for number, part in enumerate(_parts(x, weight)):
        gradient = dy[number].float()
        if number < len(weight):
            if cosine is not None and sine is not None:
                gradient = _rotated(gradient, cosine, -sine, head)
            scale = rstd[number].view(*x.shape[:-1], 1)
            normed = part * scale
            sums.append((gradient * normed).flatten(0, -2).sum(0))
            gradient = gradient * weight[number]
            gradient = scale * (gradient - normed * (gradient * normed).mean(-1, keepdim=True))
        dx.append(gradient.to(x.dtype))
    return torch.cat(dx, -1), torch.stack([*sums, *(part.float().flatten(0, -2).sum(0) for part in dx)])


@_shapes_of("rotate_backward")  # type: ignore[untyped-decorator]
def _(dy: list[Tensor], x: Tensor, weight: Tensor, cosine: Any, sine: Any, rstd: Tensor, head: int) -> Any:
    parts, width = weight.shape
    return x.new_empty(x.shape), x.new_empty(parts + x.shape[-1] // width, width, dtype=torch.float32)


@_operation("Tensor dy, Tensor x", "(Tensor, Tensor)")
def gelu_backward(dy: Tensor, x: Tensor) -> Any:
    """Returns the gradient with respect to x of gelu(x), and its sum over tokens."""
    dx = torch.ops.aten.gelu_backward(dy, x, approximate="tanh")
    return dx, dx.float().flatten(0, -2).sum(0)


@_shapes_of("gelu_backward")  # type: ignore[untyped-decorator]
def _(dy: Tensor, x: Tensor) -> Any:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1], dtype=torch.float32)
