"""Which device this process computes on, and the switches of torch that go with it."""

from __future__ import annotations

import os

import torch

from unisono.cluster.environment import World
from unisono.engine.precision import compute_type
from unisono.errors import ConfigError
from unisono.parallel.strategy import Placement
from unisono.settings import Settings


def find_placement(world: World, settings: Settings) -> Placement:
    """The device of this rank: its GPU by local rank, or the CPU."""
    count = torch.cuda.device_count() if settings.launch.gpus != "0" else 0
    if count == 0:
        device = torch.device("cpu")
        devices = [device]
    else:
        device = torch.device("cuda", world.local_rank % count)
        torch.cuda.set_device(device)
        devices = [torch.device("cuda", i) for i in range(count)] if settings.parallel.strategy == "dp" else [device]
    dtype = compute_type(settings.precision)
    if dtype == torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError(
            f"mixed_precision bf16: {torch.cuda.get_device_name(device)} cannot compute in bf16; use fp16"
        )
    if dtype is not None and settings.precision.dtype == "float64":
        raise ConfigError("mixed_precision and dtype float64 contradict each other; leave one of them out")
    return Placement(device, world.rank, world.size, devices, dtype, settings.run.deterministic)


def set_switches(settings: Settings) -> None:
    """Determinism and matrix precision, which torch keeps per process."""
    torch.set_default_dtype(torch.float64 if settings.precision.dtype == "float64" else torch.float32)
    torch.set_float32_matmul_precision("high" if settings.precision.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = settings.precision.tf32
    if settings.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(settings.run.deterministic)
