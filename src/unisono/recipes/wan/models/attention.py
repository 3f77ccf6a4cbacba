"""Which kernel computes attention: the one that is fastest here, by measurement.

With long films attention is most of a step, and kernels differ by half. The choice is handed to diffusers, whose own
attention code stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_TIMED = ("cudnn", "flash", "efficient")
_TRIES = 5
_CLEARLY = 0.97  # another kernel than torch's own choice must need so much less time to be taken


def use(kernel: str, transformer: nn.Module) -> None:
    """Lets a diffusers transformer compute attention by this kernel; `auto` is torch's own choice."""
    if kernel != "auto":
        transformer.set_attention_backend(f"_native_{kernel}")  # type: ignore[operator]


def can_compute(kernel: str, device_type: str, dtype: torch.dtype) -> bool:
    """Whether a kernel computes in this type on such a device; they are made for GPUs, and most of them for 16 bit."""
    if kernel in ("auto", "math"):
        return True
    types = (torch.bfloat16, torch.float16, *([torch.float32] if kernel == "efficient" else []))
    return device_type == "cuda" and dtype in types


def choose(times: dict[str, float]) -> str:
    """The fastest kernel; torch's own choice, unless another is clearly faster."""
    best = min(times, key=lambda kernel: times[kernel], default="auto")
    return best if best != "auto" and times[best] < _CLEARLY * times.get("auto", float("inf")) else "auto"


def measure(heads: int, head_width: int, tokens: int, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Milliseconds of attention forwards and backwards by each kernel that can compute it; `auto` is torch's choice."""
    inside = [torch.randn(1, heads, tokens, head_width, device=device, dtype=dtype) for _ in range(3)]
    for tensor in inside:
        tensor.requires_grad_()
    found = {}
    for kernel in ("auto", *_TIMED):
        try:
            found[kernel] = _milliseconds(inside, kernel)
        except RuntimeError:  # not made for this GPU, type or size
            continue
    return found


def _milliseconds(inside: list[Tensor], kernel: str) -> float:
    times: list[float] = []
    for _ in range(_TRIES + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        out = _attention(inside, kernel)
        torch.autograd.grad(out, inside, torch.ones_like(out))
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[1:])[_TRIES // 2]


def _attention(inside: list[Tensor], kernel: str) -> Any:
    if kernel == "auto":
        return F.scaled_dot_product_attention(inside[0], inside[1], inside[2])
    with sdpa_kernel(KERNELS[kernel]):
        return F.scaled_dot_product_attention(inside[0], inside[1], inside[2])
