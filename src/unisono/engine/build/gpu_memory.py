"""Limits the GPU memory of a run."""

from __future__ import annotations

import torch

from unisono.errors import ConfigError
from unisono.formatting import format_bytes
from unisono.planning.memory.estimate import card_memory
from unisono.settings import Settings


def limit_gpu_memory(settings: Settings, device: torch.device) -> None:
    """Limits torch's allocator to `gpu_memory_gb` of GPU memory; every rank calls it."""
    gigabytes = settings.memory.gpu_memory_gb
    if gigabytes is None or device.type != "cuda":
        return
    total = torch.cuda.mem_get_info(device)[1]
    allowed = card_memory(gigabytes)
    if allowed > total:
        raise ConfigError(
            f"gpu_memory_gb {gigabytes:g}: {torch.cuda.get_device_name(device)} has only {format_bytes(total)}; remove "
            "it, or use a smaller number"
        )
    torch.cuda.set_per_process_memory_fraction(allowed / total, device)


def free_gpu_memory(device: torch.device) -> float:
    """Returns the bytes that torch's allocator may use on this GPU, including what it uses already."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total
    return float(min(free + torch.cuda.memory_reserved(device), allowed))
