"""The Triton kernel of AdamW: one pass over weights, gradients and moments of any number of tensors."""

# Triton is missing on machines without a GPU, and the code it compiles is not typed Python.
# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.optim.adamw import CHUNK

_BLOCK, _WARPS = 1024, 4


@triton.jit
def _pointer(addresses, number, ALIGNED: tl.constexpr):
    pointer = tl.load(addresses + number).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _adamw(
    addresses, of_tensors, owners, rate_tensor, rate, decay, new1, new2, log_beta1, log_beta2, eps, grad_scale,
    found_inf, count, RATE: tl.constexpr, SCALE: tl.constexpr, SKIP: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    skips = 0.0
    if SKIP:
        skips = tl.load(found_inf)
    if skips == 0.0:
        chunk = tl.program_id(0)
        number = tl.load(owners + chunk)
        size = tl.load(of_tensors + number)
        if ALIGNED:
            size = tl.multiple_of(size, 4)
        begin = (chunk - tl.load(of_tensors + count + number)) * CHUNK
        weights = _pointer(addresses, number, ALIGNED)
        gradients = _pointer(addresses, count + number, ALIGNED)
        firsts = _pointer(addresses, 2 * count + number, ALIGNED)
        seconds = _pointer(addresses, 3 * count + number, ALIGNED)
        # Compute in float64: 1 minus a power near 1 would have few correct digits in float32.
        step = tl.load(_pointer(addresses, 4 * count + number, False)).to(tl.float64)
        correction1 = (1.0 - tl.exp(step * log_beta1)).to(tl.float32)
        correction2 = tl.sqrt(1.0 - tl.exp(step * log_beta2)).to(tl.float32)
        if RATE:
            rate = tl.load(rate_tensor).to(tl.float32)
        size_of_step = tl.div_rn(rate, correction1)
        if SCALE:
            scale = tl.load(grad_scale)
        for offset in range(0, CHUNK, BLOCK):
            at = begin + offset + tl.arange(0, BLOCK)
            there = at < size
            gradient = tl.load(gradients + at, mask=there, other=0.0)
            if SCALE:
                gradient = tl.div_rn(gradient, scale)
            weight = tl.load(weights + at, mask=there, other=0.0)
            first = tl.load(firsts + at, mask=there, other=0.0)
            second = tl.load(seconds + at, mask=there, other=0.0)
            weight -= rate * decay * weight
            first += (gradient - first) * new1
            second += (gradient * gradient - second) * new2
            weight -= size_of_step * tl.div_rn(first, tl.div_rn(tl.sqrt_rn(second), correction2) + eps)
            tl.store(weights + at, weight, mask=there)
            tl.store(firsts + at, first, mask=there)
            tl.store(seconds + at, second, mask=there)


def adamw(
    addresses: Tensor,
    of_tensors: Tensor,
    owners: Tensor,
    rate_tensor: Tensor | None,
    rate: float,
    decay: float,
    betas: tuple[float, float, float, float],
    eps: float,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    *,
    is_aligned: bool,
) -> None:
    """Takes one step. `addresses` has one row each for weights, gradients, both moments and step counters.

    `of_tensors` contains the size and the first chunk of each tensor, and `owners` the tensor that each chunk belongs
    to. `betas` are 1 - beta and log(beta) of both moments.
    """
    numbers = (rate_tensor, rate, decay, *betas, eps, grad_scale, found_inf, addresses.shape[1])
    flags = {"RATE": rate_tensor is not None, "SCALE": grad_scale is not None, "SKIP": found_inf is not None}
    with torch.cuda.device(addresses.device):  # Triton launches on the current device
        _adamw[(len(owners),)](
            addresses, of_tensors, owners, *numbers, **flags, ALIGNED=is_aligned, CHUNK=CHUNK, BLOCK=_BLOCK,
            num_warps=_WARPS,
        )  # fmt: skip
