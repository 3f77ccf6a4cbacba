"""Determines the engine's devices, processes, precision and effective batch.

If fewer GPUs are available than requested, the effective batch stays the same, and the engine prints a note.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from unisono.cluster.environment import World, detect
from unisono.devices import visible_gpus
from unisono.errors import ConfigError
from unisono.multi_gpu.config import MultiGPUConfig
from unisono.multi_gpu.gpus import memory_of, setup_distributed_training, world_for
from unisono.recipes.seo.front.config import PRECISIONS, SEOConfig


@dataclass(frozen=True)
class Devices:
    """The devices of an engine."""

    world: World
    strategy: str
    """The strategy: single, dataparallel or distributed."""
    num_gpus: int
    """GPUs in use over all processes; 0: the CPU."""
    num_requested: int
    """Number of requested devices, which determines the effective batch."""
    note: str | None = None
    """Printed once if there are fewer devices than requested."""

    @property
    def num_devices(self) -> int:
        """Number of GPUs, or of processes on the CPU."""
        return max(self.num_gpus, self.world.size)

    @property
    def device(self) -> torch.device:
        """This process's device; the first GPU under dataparallel."""
        return torch.device("cuda", self.world.local_rank) if self.num_gpus else torch.device("cpu")

    def memory(self) -> dict[str, dict[str, int]]:
        """Returns the memory use of this process on its devices, in bytes."""
        if self.num_gpus and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return {}
        if self.strategy != "dataparallel":
            return memory_of([self.device])
        return memory_of([torch.device("cuda", index) for index in range(self.num_gpus)])


def find_devices(config: SEOConfig) -> Devices:
    """Chooses the devices for a config and joins the other processes, if there are any."""
    config.check()
    gpus, world = visible_gpus(), _world(config)
    if world.size == 1:
        return _of_one_process(config, world, len(gpus))
    if not config.use_multi_gpu:
        raise ConfigError(
            f"{world.launcher} started {world.size} processes, but use_multi_gpu is False; set it, with "
            "multi_gpu_strategy='distributed'"
        )
    if config.multi_gpu_strategy == "dataparallel":
        raise ConfigError(
            f"multi_gpu_strategy dataparallel trains on all GPUs from one process, but {world.launcher} started "
            f"{world.size}; use 'distributed', or start the script with python"
        )
    requested = max(config.num_gpus * world.num_nodes, config.distributed_world_size, world.size)
    devices = Devices(world, "distributed", world.size if gpus else 0, requested)
    address, port = world.master_addr, str(world.master_port)
    setup_distributed_training(world.rank, world.size, address, port, backend=config.distributed_backend)
    return replace(devices, note=_note(config, devices, 0))


def _of_one_process(config: SEOConfig, world: World, num_available: int) -> Devices:
    if not config.use_multi_gpu:
        return Devices(world, "single", min(1, num_available), 1)
    strategy = "dataparallel" if config.multi_gpu_strategy == "auto" else config.multi_gpu_strategy
    num_gpus = min(config.num_gpus if strategy == "dataparallel" else 1, num_available)
    devices = Devices(world, strategy if num_gpus > 1 else "single", num_gpus, config.num_gpus)
    return replace(devices, note=_note(config, devices, num_available))


def _world(config: SEOConfig) -> World:
    """Returns the world that the launcher or the config defines; otherwise, a world of one process."""
    world = detect()
    by_hand = config.use_multi_gpu and config.multi_gpu_strategy != "dataparallel" and config.distributed_world_size > 1
    if world.launcher != "plain" or not by_hand:
        return world
    address, port = config.master_address()
    return world_for(
        MultiGPUConfig(
            rank=config.distributed_rank,
            world_size=config.distributed_world_size,
            master_addr=address,
            master_port=port,
            backend=config.distributed_backend,
        )
    )


def _note(config: SEOConfig, devices: Devices, num_available: int) -> str | None:
    if devices.num_devices >= devices.num_requested:
        return None
    if devices.num_gpus > 1:
        available = f"{devices.num_gpus} GPUs are"
    elif devices.world.size > 1:
        available = f"{devices.world.size} processes are"
    else:
        available = "one GPU is" if devices.num_gpus else "one CPU is"
    batch = effective_batch(config, devices.num_requested)
    note = f"{devices.num_requested} GPUs were requested and {available} used: the effective batch stays {batch}"
    if num_available > devices.num_devices:
        note += f"; torchrun --nproc_per_node={num_available} script.py uses all {num_available} GPUs"
    return note


def effective_batch(config: SEOConfig, num_devices: int) -> int:
    """Returns the number of texts per optimizer step."""
    if config.effective_batch_size is not None:
        return config.effective_batch_size
    return config.batch_size * num_devices * config.gradient_accumulation_steps


def precision(config: SEOConfig, devices: Devices) -> str:
    """Returns the mixed precision to train with: no, fp16 or bf16."""
    if not config.use_mixed_precision:
        return "no"
    if config.mixed_precision_dtype != "auto":
        return PRECISIONS[config.mixed_precision_dtype]
    if not devices.num_gpus:
        return "no"  # on a CPU, 16-bit precision is slower than 32-bit
    # Ask NVML, because initialising CUDA would prevent this process from selecting its GPUs later.
    capabilities = [(gpu.capability or "0").split(".") for gpu in visible_gpus()]
    return "bf16" if max((int(major) for major, *_ in capabilities), default=0) >= 8 else "fp16"


def trainer_config(config: SEOConfig, devices: Devices, **further: Any) -> MultiGPUConfig:
    """Converts the settings to those of unisono.multi_gpu, which runs the training."""
    launched_on_gpus = devices.world.size > 1 and devices.num_gpus > 0
    values: dict[str, Any] = {
        "title": f"AdvancedLLMSEOEngine ({config.model_name})",
        "num_gpus": None if launched_on_gpus else devices.num_gpus,
        "min_memory_gb": 0.0,
        "strategy": devices.strategy,
        "backend": config.distributed_backend,
        "num_workers": config.dataloader_num_workers,
        "global_batch_size": effective_batch(config, devices.num_requested),
        "grad_clip": 1.0,
        "mixed_precision": precision(config, devices),
        "activation_checkpointing": config.gradient_checkpointing,
        "scheduler_interval": "step",
    }
    same = ("find_unused_parameters", "gradient_as_bucket_view", "broadcast_buffers", "bucket_cap_mb", "static_graph")
    values |= {name: getattr(config, name) for name in (*same, "batch_size", "learning_rate", "seed")}
    own_fields = {field.name for field in fields(MultiGPUConfig)}
    values |= {name: value for name, value in config.settings.items() if name in own_fields}
    settings = {name: value for name, value in config.settings.items() if name not in own_fields}
    return MultiGPUConfig(**values, **further, settings={"sync_batch_norm": config.sync_batch_norm, **settings})
