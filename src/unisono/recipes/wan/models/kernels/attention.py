"""Chooses the attention kernel: the fastest one on this GPU, by measurement.

With long videos, attention takes most of a step, and the measured times of the kernels differed by about 50 %.
diffusers' attention processors store the choice; our own blocks read it from there.
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
from unisono.recipes.common.cache_files import write_cache_file

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_PREFIX = "_native_"  # prefix of these kernels' names in diffusers
_NATIVE = {_PREFIX + name: kernel for name, kernel in KERNELS.items()}
_TIMED = ("cudnn", "flash", "efficient")
_TRIES = 5
_BUSY = 8192  # tokens; with fewer, a GPU idles and launch overhead would decide
_CLEARLY = 0.97  # another kernel is used only if it takes less than this fraction of the time of PyTorch's own choice


class Kernel:
    """Determines the attention kernel of a run: the one in the settings, or the fastest one."""

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._file: Path | None = None
        self._is_checked = False

    def measure(self, work: Work, transformer: Mapping[str, Any], tokens: int) -> None:
        """Finds the fastest kernel for this number of tokens, once per kind of GPU; called in prepare()."""
        if self._setting != "auto" or not work.device.startswith("cuda"):
            return
        # A run may resume on another kind of GPU, where another kernel is fastest.
        gpu = "".join(sign if sign.isalnum() else "_" for sign in torch.cuda.get_device_name(work.device))
        self._file = work.folder / f"attention_{gpu}.json"
        for file in work.share([self._file]):
            if file.exists():
                continue
            heads, head_width = int(transformer["num_attention_heads"]), int(transformer["attention_head_dim"])
            times = measure(heads, head_width, tokens, torch.bfloat16, work.device)
            chosen = choose(times)
            write_cache_file(file, json.dumps({"kernel": chosen, "milliseconds": times, "tokens": tokens}).encode())
            listing = ", ".join(f"{kernel} {ms:.2f}" for kernel, ms in times.items())
            work.message(f"attention of {tokens:,} tokens in ms: {listing}; using {chosen}")

    @property
    def name(self) -> str:
        """Name of the kernel; `auto` is PyTorch's own choice."""
        if self._file is None or not self._file.exists():
            return self._setting
        return str(json.loads(self._file.read_text())["kernel"])

    def name_for(self, context: int) -> str:
        """Returns the name of the kernel for a run in which `context` ranks share a sample.

        The measurement used whole samples. If ranks share a sample, each rank computes fewer heads, and not every
        kernel accepts their number. PyTorch then chooses the kernel, unless the settings name one.
        """
        return self.name if context == 1 else self._setting

    def check_support(self, model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        """Raises ConfigError, before the first forward pass, if the kernel does not support the run's dtype.

        If the kernel was chosen by measurement, falls back to PyTorch's own choice instead.
        """
        if self._is_checked:
            return
        self._is_checked = True
        if can_compute(self.name, device_type, dtype):
            return
        if self._setting != "auto":
            type_name = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"attention {self._setting} does not support {type_name} on a {device_type} device; use "
                "--mixed_precision bf16 on a GPU, or --attention auto"
            )
        for transformer in model.children():
            transformer.reset_attention_backend()  # type: ignore[operator]


def use(kernel: str, transformer: nn.Module) -> None:
    """Makes a diffusers transformer compute attention with this kernel; `auto` is PyTorch's own choice."""
    if kernel != "auto":
        transformer.set_attention_backend(_PREFIX + kernel)  # type: ignore[operator]


def attend(query: Tensor, key: Tensor, value: Tensor, backend: Any) -> Any:
    """Computes attention of [batch, tokens, heads, width] with the kernel that `use` stored in diffusers' processor.

    diffusers' own code needlessly copies all three tensors for cuDNN: 8 GiB in a 1.3B model's step on 81 frames.
    """
    kernel = None if backend is None else _NATIVE.get(backend.value)
    if kernel is None:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        return dispatch_attention_fn(query, key, value, backend=backend)
    heads_first = [part.transpose(1, 2) for part in (query, key, value)]
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(heads_first[0], heads_first[1], heads_first[2]).transpose(1, 2)


def kernel_name(backend: Any) -> str | None:
    """Returns the name of the kernel in diffusers' processor (`auto`: PyTorch's own choice); None if it is not ours."""
    if backend is None or backend.value == "native":
        return "auto"
    return backend.value.removeprefix(_PREFIX) if backend.value in _NATIVE else None


def can_compute(kernel: str, device_type: str, dtype: torch.dtype) -> bool:
    """Whether a kernel supports this dtype on this device. Kernels need a GPU, and most need a 16-bit dtype."""
    if kernel in ("auto", "math"):
        return True
    types = (torch.bfloat16, torch.float16, *([torch.float32] if kernel == "efficient" else []))
    return device_type == "cuda" and dtype in types


def choose(times: dict[str, float]) -> str:
    """Returns the fastest kernel, or PyTorch's own choice if no other kernel is clearly faster."""
    best = min(times, key=lambda kernel: times[kernel], default="auto")
    return best if best != "auto" and times[best] < _CLEARLY * times.get("auto", float("inf")) else "auto"


def measure(heads: int, head_width: int, tokens: int, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Measures the milliseconds of a forward and a backward pass with each kernel that supports this attention."""
    samples = -(-_BUSY // tokens)
    inputs = [torch.randn(samples, heads, tokens, head_width, device=device, dtype=dtype) for _ in range(3)]
    for tensor in inputs:
        tensor.requires_grad_()
    times = {}
    for kernel in ("auto", *_TIMED):
        try:
            times[kernel] = _milliseconds(inputs, kernel)
        except RuntimeError:  # the kernel does not support this GPU, dtype or size
            continue
    return times


def _milliseconds(inputs: list[Tensor], kernel: str) -> float:
    times: list[float] = []
    for _ in range(_TRIES + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        out = _attention(inputs, kernel)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[1:])[_TRIES // 2]


def _attention(inputs: list[Tensor], kernel: str) -> Any:
    query, key, value = inputs
    if kernel == "auto":
        return F.scaled_dot_product_attention(query, key, value)
    with sdpa_kernel(KERNELS[kernel]):
        return F.scaled_dot_product_attention(query, key, value)
