"""Triton kernels for the operations between the matrix products of a Wan block.

A row is a token. The backward pass needs sums over tokens (for modulation, norm weights and biases). Most of the gain
is that the kernels compute these sums while a row is loaded anyway: each program processes many rows and keeps its sums
in registers. The kernels use no atomics, so the same inputs always give the same sums.
"""

# Triton is missing on machines without a GPU, and code for Triton cannot be typed.
# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = (4, 2)  # programs per multiprocessor, for rows of up to 2048 numbers and for longer rows
_GELU = (16, 128, 32, 4)


@triton.jit
def _norm(
    x, o, gate, weight, bias, h, y, mean, rstd, rows, width, eps,
    ADD: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = column < width
    at = row * width + column
    of_group = row // rows * width + column
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(o + at, mask=there, other=0.0).to(tl.float32)
        if GATE:
            added *= tl.load(gate + of_group, mask=there, other=0.0).to(tl.float32)
        rounded = (value + added).to(h.dtype.element_ty)
        tl.store(h + at, rounded, mask=there)
        value = rounded.to(tl.float32)
    middle = tl.sum(value, 0) / width
    centred = tl.where(there, value - middle, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    tl.store(mean + row, middle)
    tl.store(rstd + row, scale)
    w = tl.load(weight + of_group, mask=there, other=0.0).to(tl.float32)
    b = tl.load(bias + of_group, mask=there, other=0.0).to(tl.float32)
    tl.store(y + at, (centred * scale * w + b).to(y.dtype.element_ty), mask=there)


@triton.jit
def _norm_backward(
    dh, dy, h, o, gate, weight, bias, mean, rstd, dx, do, sums, y, rows, width,
    GATE: tl.constexpr, ADDED: tl.constexpr, AGAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With AGAIN, also computes the norm's output y; if there is a gate, the argument `h` is then x."""
    first, step, group = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = column < width
    w = tl.load(weight + group * width + column, mask=there, other=0.0).to(tl.float32)
    sum_w, sum_b = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    if GATE:
        g = tl.load(gate + group * width + column, mask=there, other=0.0).to(tl.float32)
        sum_g = tl.zeros((BLOCK,), tl.float32)
    if ADDED:
        sum_o = tl.zeros((BLOCK,), tl.float32)
    if AGAIN:
        b = tl.load(bias + group * width + column, mask=there, other=0.0).to(tl.float32)
    for number in range(first, rows, step):
        row = group * rows + number
        at = row * width + column
        gradient = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
        value = tl.load(h + at, mask=there, other=0.0).to(tl.float32)
        if GATE:
            added = tl.load(o + at, mask=there, other=0.0).to(tl.float32)
            if AGAIN:
                value = (value + added * g).to(h.dtype.element_ty).to(tl.float32)
        passed = tl.load(dh + at, mask=there, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row)
        normed = tl.where(there, (value - tl.load(mean + row)) * scale, 0.0)
        if AGAIN:
            tl.store(y + at, (normed * w + b).to(y.dtype.element_ty), mask=there)
        sum_b += gradient
        sum_w += gradient * normed
        gradient *= w
        along = tl.sum(gradient * normed, 0) / width
        middle = tl.sum(gradient, 0) / width
        total = (passed + scale * (gradient - middle - normed * along)).to(dx.dtype.element_ty)
        tl.store(dx + at, total, mask=there)
        if GATE:
            total = total.to(tl.float32)
            sum_g += total * added
            total = (total * g).to(do.dtype.element_ty)
            tl.store(do + at, total, mask=there)
        if ADDED:
            sum_o += total.to(tl.float32)
    place = sums + (group * step + first) * width + column
    every = tl.num_programs(1).to(tl.int64) * step * width
    tl.store(place, sum_w, mask=there)
    tl.store(place + every, sum_b, mask=there)
    if GATE:
        tl.store(place + 2 * every, sum_g, mask=there)
    if ADDED:
        tl.store(place + (2 + GATE) * every, sum_o, mask=there)


@triton.jit
def _gate_backward(dh, o, gate, do, sums, rows, width, BLOCK: tl.constexpr):
    first, step, group = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = column < width
    g = tl.load(gate + group * width + column, mask=there, other=0.0).to(tl.float32)
    sum_g, sum_o = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for number in range(first, rows, step):
        at = (group * rows + number) * width + column
        total = tl.load(dh + at, mask=there, other=0.0).to(tl.float32)
        sum_g += total * tl.load(o + at, mask=there, other=0.0).to(tl.float32)
        rounded = (total * g).to(do.dtype.element_ty)
        tl.store(do + at, rounded, mask=there)
        sum_o += rounded.to(tl.float32)
    place = sums + (group * step + first) * width + column
    tl.store(place, sum_g, mask=there)
    tl.store(place + tl.num_programs(1).to(tl.int64) * step * width, sum_o, mask=there)


@triton.jit
def _rotated(value, cosine, sine, token, width, head, way: tl.constexpr, BLOCK: tl.constexpr):
    """Rotates each pair of numbers by the token's angles, or back if `way` is -1."""
    pair = tl.arange(0, BLOCK // 2)
    at = token * head + 2 * pair % head
    c = tl.load(cosine + at, mask=2 * pair < width, other=0.0)
    s = way * tl.load(sine + at + 1, mask=2 * pair < width, other=0.0)
    left, right = tl.split(tl.reshape(value, (BLOCK // 2, 2)))
    return tl.reshape(tl.join(left * c - right * s, left * s + right * c), (BLOCK,))


@triton.jit
def _rotate(
    x, weight, cosine, sine, y, rstd, stride, rows, tokens, width, head, eps,
    ROTATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    there = column < width
    value = tl.load(x + row * stride + part * width + column, mask=there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    row_of_part = part.to(tl.int64) * rows + row
    tl.store(rstd + row_of_part, scale)
    value *= scale * tl.load(weight + part * width + column, mask=there, other=0.0).to(tl.float32)
    if ROTATE:
        value = _rotated(value, cosine, sine, row % tokens, width, head, 1.0, BLOCK)
    tl.store(y + row_of_part * width + column, value.to(y.dtype.element_ty), mask=there)


@triton.jit
def _rotate_backward(
    first_dy, second_dy, third_dy, x, weight, cosine, sine, rstd, dx, sums, stride, rows, tokens, width, head,
    PARTS: tl.constexpr, ROTATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, step, part = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.program_id(1)
    dy = first_dy
    if part == 1:
        dy = second_dy
    if part == 2:
        dy = third_dy
    column = tl.arange(0, BLOCK)
    there = column < width
    x += part * width
    dx += part * width
    sum_w, sum_b = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    if part == PARTS:  # the part without a norm, which is not changed
        for row in range(first, rows, step):
            dx_row = tl.load(dy + row * width + column, mask=there, other=0.0)
            tl.store(dx + row * stride + column, dx_row, mask=there)
            sum_b += dx_row.to(tl.float32)
    else:
        w = tl.load(weight + part * width + column, mask=there, other=0.0).to(tl.float32)
        for row in range(first, rows, step):
            gradient = tl.load(dy + row * width + column, mask=there, other=0.0).to(tl.float32)
            if ROTATE:
                gradient = _rotated(gradient, cosine, sine, row % tokens, width, head, -1.0, BLOCK)
            scale = tl.load(rstd + part.to(tl.int64) * rows + row)
            normed = tl.load(x + row * stride + column, mask=there, other=0.0).to(tl.float32) * scale
            sum_w += gradient * normed
            gradient *= w
            along = tl.sum(gradient * normed, 0) / width
            dx_row = (scale * (gradient - normed * along)).to(dx.dtype.element_ty)
            tl.store(dx + row * stride + column, dx_row, mask=there)
            sum_b += dx_row.to(tl.float32)
        tl.store(sums + (part * step + first) * width + column, sum_w, mask=there)
    tl.store(sums + ((PARTS + part) * step + first) * width + column, sum_b, mask=there)


@triton.jit
def _gelu_backward(
    dy, x, dx, y, sums, rows, width, share, AGAIN: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """With AGAIN, also writes gelu(x) to y."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, rows)
    total = tl.zeros((TILE, BLOCK), tl.float32)
    for number in range(begin, end, TILE):
        row = number + tl.arange(0, TILE)
        there = (row < end)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        square = value * value
        # Expresses tanh by a sigmoid: gelu(x) = x · sigmoid(2 · √(2/π) · (x + 0.044715 x³)).
        open = tl.sigmoid(1.5957691216057308 * value * (1.0 + 0.044715 * square))
        if AGAIN:
            tl.store(y + at, (value * open).to(y.dtype.element_ty), mask=there)
        slope = open + value * open * (1.0 - open) * 1.5957691216057308 * (1.0 + 0.134145 * square)
        rounded = (tl.load(dy + at, mask=there, other=0.0).to(tl.float32) * slope).to(dx.dtype.element_ty)
        tl.store(dx + at, rounded, mask=there)
        total += rounded.to(tl.float32)
    tl.store(sums + tl.program_id(1) * width + column, tl.sum(total, 0), mask=column < width)


@cache
def _block(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


@cache
def _programs(rows: int, groups: int, width: int, device: torch.device) -> int:
    at_once = _PROGRAMS[width > 2048] * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(rows, at_once // groups))


def norm(
    x: Tensor, o: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns h = x + o · gate, layer_norm(h) · weight + bias, and h's mean and 1 / standard deviation."""
    rows, width, groups = x.numel() // x.shape[-1], x.shape[-1], weight.shape[0]
    y, h = torch.empty_like(x), x if o is None else torch.empty_like(x)
    # Not views of one tensor, because PyTorch does not allow an operation to return views.
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    flags = {"ADD": o is not None, "GATE": gate is not None}
    _norm[(rows,)](x, o, gate, weight, bias, h, y, mean, rstd, rows // groups, width, eps, **flags, **_block(width))
    return (x.new_empty(0) if o is None else h), y, mean, rstd


def norm_backward(
    dh: Tensor,
    dy: Tensor,
    h: Tensor,
    o: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    added: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x and of o, and sums [weight, bias(, gate)(, o)], as `operations.norm_backward` does."""
    return _backward_of_norm(dh, dy, h, o, gate, weight, None, mean, rstd, added, None)


def norm_backward_again(
    dh: Tensor,
    dy: Tensor,
    x: Tensor,
    o: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    added: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Like `norm_backward` with h = x + o · gate; also returns the norm's output."""
    y = torch.empty_like(x)
    return *_backward_of_norm(dh, dy, x, o, gate, weight, bias, mean, rstd, added, y), y


def _backward_of_norm(
    dh: Tensor,
    dy: Tensor,
    h: Tensor,
    o: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    added: bool,
    y: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    width, groups = h.shape[-1], weight.shape[0]
    rows = h.numel() // width // groups
    programs = _programs(rows, groups, width, h.device)
    dx, do = torch.empty_like(h), h.new_empty(0) if gate is None or o is None else torch.empty_like(o)
    sums = h.new_empty(2 + (gate is not None) + added, groups, programs, width, dtype=torch.float32)
    inside = (dh, dy, h, o, gate, weight, bias, mean, rstd, dx, do, sums, y, rows, width)
    flags = {"GATE": gate is not None, "ADDED": added, "AGAIN": y is not None}
    _norm_backward[(programs, groups)](*inside, **flags, **_block(width))
    return dx, do, sums.sum(2)


def gate_backward(dh: Tensor, o: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradient of o in x + o · gate, and the gradients of gate and of o summed over tokens."""
    width, groups = o.shape[-1], gate.shape[0]
    rows = o.numel() // width // groups
    programs = _programs(rows, groups, width, o.device)
    do, sums = torch.empty_like(o), o.new_empty(2, groups, programs, width, dtype=torch.float32)
    _gate_backward[(programs, groups)](dh, o, gate, do, sums, rows, width, **_block(width))
    return do, sums.sum(2)


def rotate(
    x: Tensor, weight: Tensor, cosine: Tensor | None, sine: Tensor | None, head: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns, for each part of x, RMS norm · weight with the rotary embedding, and 1 / root mean square."""
    (parts, width), stride = weight.shape, x.shape[-1]
    rows = x.numel() // stride
    y, rstd = x.new_empty(parts, *x.shape[:-1], width), x.new_empty(parts, rows, dtype=torch.float32)
    sizes = (stride, rows, x.shape[-2], width, head, eps)
    _rotate[(rows, parts)](x, weight, cosine, sine, y, rstd, *sizes, ROTATE=cosine is not None, **_block(width))
    return y, rstd


def rotate_backward(
    dy: list[Tensor], x: Tensor, weight: Tensor, cosine: Tensor | None, sine: Tensor | None, rstd: Tensor, head: int
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of x, and sums over tokens [weight of each rotated part, x of each part]."""
    (parts, width), stride = weight.shape, x.shape[-1]
    rows = x.numel() // stride
    programs = _programs(rows, len(dy), width, x.device)
    dx, sums = torch.empty_like(x), x.new_empty(parts + len(dy), programs, width, dtype=torch.float32)
    inside = (dy[0], dy[min(1, len(dy) - 1)], dy[-1], x, weight, cosine, sine, rstd, dx, sums)
    sizes, flags = (stride, rows, x.shape[-2], width, head), {"PARTS": parts, "ROTATE": cosine is not None}
    _rotate_backward[(programs, len(dy))](*inside, *sizes, **flags, **_block(width))
    return dx, sums.sum(1)


def gelu_backward(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradient with respect to x of gelu(x), and its sum over tokens."""
    return _backward_of_gelu(dy, x, None)


def gelu_backward_again(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Like `gelu_backward`; also returns gelu(x)."""
    y = torch.empty_like(x)
    return *_backward_of_gelu(dy, x, y), y


def _backward_of_gelu(dy: Tensor, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    tile, block, parts, warps = _GELU
    share = tile * triton.cdiv(rows, parts * tile)
    parts = triton.cdiv(rows, share)
    dx, sums = torch.empty_like(x), x.new_empty(parts, width, dtype=torch.float32)
    inside, flags = (dy, x, dx, y, sums, rows, width, share), {"AGAIN": y is not None, "TILE": tile, "BLOCK": block}
    _gelu_backward[(triton.cdiv(width, block), parts)](*inside, **flags, num_warps=warps)
    return dx, sums.sum(0)
