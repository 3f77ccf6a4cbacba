"""Which kernel computes attention: the one that is fastest here, by measurement.

With long films attention is most of a step, and kernels differ by half. The choice is handed to diffusers, whose own
attention code stays as it is; our own blocks read it from there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.recipes.common.whole_files import write_whole

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_PREFIX = "_native_"  # of these kernels' names in diffusers
_NATIVE = {_PREFIX + name: kernel for name, kernel in KERNELS.items()}
_TIMED = ("cudnn", "flash", "efficient")
_TRIES = 5
_BUSY = 8192  # tokens: with fewer a GPU waits, and the kernel is chosen that is launched fastest
_CLEARLY = 0.97  # another kernel than torch's own choice must need so much less time to be taken


class Kernel:
    """The kernel of a run: the one that was asked for, or the fastest."""

    def __init__(self, asked: str) -> None:
        self._asked = asked
        self._file: Path | None = None
        self._is_sure = False

    def measure(self, work: Work, transformer: Mapping[str, Any], tokens: int) -> None:
        """In prepare(): finds the fastest for so many tokens, once for each kind of GPU."""
        if self._asked != "auto" or not work.device.startswith("cuda"):
            return
        # Another kind of GPU, on which a run may go on, has other kernels.
        gpu = "".join(sign if sign.isalnum() else "_" for sign in torch.cuda.get_device_name(work.device))
        self._file = work.folder / f"attention_{gpu}.json"
        for file in work.share([self._file]):
            if file.exists():
                continue
            heads, head_width = int(transformer["num_attention_heads"]), int(transformer["attention_head_dim"])
            times = measure(heads, head_width, tokens, torch.bfloat16, work.device)
            chosen = choose(times)
            write_whole(file, json.dumps({"kernel": chosen, "milliseconds": times, "tokens": tokens}).encode())
            told = ", ".join(f"{kernel} {ms:.2f}" for kernel, ms in times.items())
            work.message(f"attention of {tokens:,} tokens in ms: {told}; taking {chosen}")

    @property
    def name(self) -> str:
        """What it is called; `auto` is torch's own choice."""
        if self._file is None or not self._file.exists():
            return self._asked
        return str(json.loads(self._file.read_text())["kernel"])

    def settle(self, model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        """Before the first forward pass, when it is known in which type a run computes: leaves one that cannot."""
        if self._is_sure:
            return
        self._is_sure = True
        if can_compute(self.name, device_type, dtype):
            return
        if self._asked != "auto":
            type_name = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"attention {self._asked} does not compute in {type_name} on a {device_type} device; use "
                "--mixed_precision bf16 on a GPU, or --attention auto"
            )
        for transformer in model.children():
            transformer.reset_attention_backend()  # type: ignore[operator]


def use(kernel: str, transformer: nn.Module) -> None:
    """Lets a diffusers transformer compute attention by this kernel; `auto` is torch's own choice."""
    if kernel != "auto":
        transformer.set_attention_backend(_PREFIX + kernel)  # type: ignore[operator]


def attend(query: Tensor, key: Tensor, value: Tensor, backend: Any) -> Any:
    """Attention of [batch, tokens, heads, width] by the kernel of `use`, where diffusers keeps it in a processor.

    Diffusers' own code copies all three for cuDNN: 8 GiB of a 1.3B model's step on 81 frames. Nothing asks for that.
    """
    kernel = None if backend is None else _NATIVE.get(backend.value)
    if kernel is None:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        return dispatch_attention_fn(query, key, value, backend=backend)
    inside = [part.transpose(1, 2) for part in (query, key, value)]
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(inside[0], inside[1], inside[2]).transpose(1, 2)


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
    samples = -(-_BUSY // tokens)
    inside = [torch.randn(samples, heads, tokens, head_width, device=device, dtype=dtype) for _ in range(3)]
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
