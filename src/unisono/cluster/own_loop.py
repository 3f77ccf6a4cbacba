"""Sets up the process group in training loops that users write themselves, under any launcher."""

from __future__ import annotations

import os

from unisono.cluster.environment import detect
from unisono.cluster.slurm.commands import address_of


def setup_distributed() -> tuple[int, int, int]:
    """Initialises the process group of the ranks that a launcher started; returns rank, world_size, local_rank."""
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
    """Destroys the process group that `setup_distributed` initialised."""
    from unisono.cluster.process_group import leave_process_group

    leave_process_group()


def is_main_process(rank: int | None = None) -> bool:
    """Whether this is rank 0, the process that prints and writes shared files."""
    return (detect().rank if rank is None else rank) == 0
