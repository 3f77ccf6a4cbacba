"""For training loops of one's own: joining the processes that a launcher has started, by the names people know."""

from __future__ import annotations

import os

from unisono.cluster.environment import detect
from unisono.cluster.slurm import address_of


def setup_distributed() -> tuple[int, int, int]:
    """Joins the processes that a launcher has started, and gives rank, world_size and local_rank."""
    import torch
    from torch import distributed

    world, gpus = detect(), torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(world.local_rank % gpus)
    if world.size > 1 and not distributed.is_initialized():
        address = address_of(world.master_addr) if world.launcher == "slurm" else world.master_addr
        os.environ.setdefault("MASTER_ADDR", address)
        os.environ.setdefault("MASTER_PORT", str(world.master_port))
        backend = "nccl" if gpus >= world.local_size else "gloo"  # NCCL refuses two processes on one GPU
        distributed.init_process_group(backend, rank=world.rank, world_size=world.size)
    return world.rank, world.size, world.local_rank


def cleanup_distributed() -> None:
    """Leaves the processes that setup_distributed has joined."""
    from unisono.cluster.processes import leave

    leave()


def is_main_process(rank: int | None = None) -> bool:
    """Whether this is the one process that talks and writes."""
    return (detect().rank if rank is None else rank) == 0
