"""Chooses the device of this rank, and sets torch's global switches for a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from unisono.cluster.environment import World
from unisono.engine.checks import check_context
from unisono.engine.step.precision import compute_type, weight_type
from unisono.errors import ConfigError
from unisono.parallel.strategy import Placement
from unisono.settings import Settings


def find_placement(world: World, settings: Settings) -> Placement:
    """Returns the device of this rank: its GPU by local rank, or the CPU."""
    count = torch.cuda.device_count() if settings.launch.gpus != "0" else 0
    if count == 0:
        device = torch.device("cpu")
        devices = [device]
    else:
        # Without a launcher, use the current device of this process, which the caller may have set.
        has_launcher = world.launcher != "plain"
        device = torch.device("cuda", world.local_rank % count if has_launcher else torch.cuda.current_device())
        torch.cuda.set_device(device)
        _use_expandable_segments()
        devices = [torch.device("cuda", i) for i in range(count)] if settings.parallel.strategy == "dp" else [device]
    dtype = compute_type(settings.precision)
    if dtype == torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        name, kind = torch.cuda.get_device_name(device), settings.precision.mixed_precision
        raise ConfigError(f"mixed_precision {kind}: {name} cannot compute in bf16; use fp16")
    if dtype is not None and settings.precision.dtype == "float64":
        raise ConfigError("mixed_precision and dtype float64 contradict each other; remove one of them")
    context = settings.parallel.context_parallel
    check_context(context, world.size)
    return Placement(device, world.rank, world.size, devices, dtype, settings.run.deterministic, context=context)


def _use_expandable_segments() -> None:
    """Lets torch's allocator grow its segments, unless the user has set the allocator's options.

    With segments of fixed sizes, a LoRA of Wan 14B ran out of 22 GiB of memory while 1.2 GiB were free but fragmented.
    """
    if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


@cache
def has_flash_attention(device: torch.device) -> bool:
    """Whether flash attention kernels, which compute in 16-bit precision, run on this device."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@contextmanager
def own_stream(settings: Settings, device: torch.device) -> Iterator[None]:
    """A context in which, with cuda_graph, everything runs on one separate stream.

    CUDA cannot capture on the default stream, and autograd accumulates a gradient on the stream of its first use.
    """
    if not settings.precision.cuda_graph or device.type != "cuda":
        yield
        return
    before, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    own.wait_stream(before)
    with torch.cuda.stream(own):
        yield
    before.wait_stream(own)


@contextmanager
def switches(settings: Settings, *, many_shapes: bool = False) -> Iterator[None]:
    """A context that sets torch's global switches for determinism, precision and kernels, and restores them.

    `many_shapes`: disables cuDNN attention, which takes tens of milliseconds to prepare for each new shape.
    """
    cudnn, attention = torch.backends.cudnn, torch.backends.cuda
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    had_cudnn = attention.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.set_default_dtype(weight_type(settings.precision))
    torch.set_float32_matmul_precision("high" if settings.precision.tf32 else "highest")
    cudnn.allow_tf32 = settings.precision.tf32
    if settings.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads this when it starts
        cudnn.benchmark = False
    torch.use_deterministic_algorithms(settings.run.deterministic)
    if many_shapes:
        attention.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.set_default_dtype(before[0])
        torch.set_float32_matmul_precision(before[1])
        cudnn.allow_tf32, cudnn.benchmark = before[2:]
        torch.use_deterministic_algorithms(was_deterministic)
        attention.enable_cudnn_sdp(had_cudnn)
