"""On what the engine trains: which devices, in how many processes, in which precision, with which effective batch.

What was asked for is kept where it can be: with fewer GPUs than asked for, the effective batch stays, and one line
says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    """Where a config trains on this machine, as it was started."""

    world: World
    strategy: str
    """single, dataparallel or distributed."""
    num_gpus: int
    """GPUs that take part, over all processes; 0: the CPU."""
    asked: int
    """Devices whose effective batch is kept."""
    gpu_ids: tuple[int, ...] | None = None
    note: str | None = None

    @property
    def num_devices(self) -> int:
        """GPUs, or processes on the CPU."""
        return max(self.num_gpus, self.world.size)

    @property
    def device(self) -> torch.device:
        """This process's own (of several, its first)."""
        if not self.num_gpus:
            return torch.device("cpu")
        return torch.device("cuda", self.gpu_ids[0] if self.gpu_ids else self.world.local_rank)


def find_devices(config: SEOConfig) -> Devices:
    """The devices for this config; what cannot be is refused, what is smaller than asked for is noted."""
    config.check()
    gpus = [] if config.device == "cpu" else visible_gpus()
    if config.device.startswith("cuda") and not gpus:
        raise ConfigError(f"device {config.device}: there is no GPU here; device='auto' takes the CPU then")
    ids = (int(config.device.removeprefix("cuda:")),) if config.device.startswith("cuda:") else None
    world = _world(config)
    if not config.use_multi_gpu:
        if world.size > 1:
            raise ConfigError(
                f"the launcher ({world.launcher}) started {world.size} processes, and use_multi_gpu is False; set it, "
                "with multi_gpu_strategy='distributed'"
            )
        return Devices(world, "single", min(1, len(gpus)), 1, ids)
    if world.size > 1:
        return _of_several(config, world, bool(gpus))
    strategy = "dataparallel" if config.multi_gpu_strategy == "auto" else config.multi_gpu_strategy
    used = min(config.num_gpus if strategy == "dataparallel" else 1, len(gpus))
    asked = config.num_gpus
    found = Devices(world, strategy if used > 1 else "single", used, asked, ids)
    return replace(found, note=_smaller(config, found, len(gpus)))


def _world(config: SEOConfig) -> World:
    """The processes there are: as the launcher says, else as the config does, else this one alone."""
    world = detect()
    by_hand = config.use_multi_gpu and config.multi_gpu_strategy != "dataparallel" and config.distributed_world_size > 1
    if world.launcher == "plain" and by_hand:
        return world_for(_by_hand(config))
    return world


def _by_hand(config: SEOConfig) -> MultiGPUConfig:
    address, port = config.meeting_point()
    return MultiGPUConfig(
        rank=config.distributed_rank,
        world_size=config.distributed_world_size,
        master_addr=address,
        master_port=port,
        backend=config.distributed_backend,
    )


def _of_several(config: SEOConfig, world: World, on_gpus: bool) -> Devices:
    if config.multi_gpu_strategy == "dataparallel":
        raise ConfigError(
            f"multi_gpu_strategy dataparallel trains with all GPUs from one process, and there are {world.size} "
            f"({world.launcher}); use 'distributed', or start the script with python"
        )
    asked = max(config.num_gpus * world.num_nodes, config.distributed_world_size, world.size)
    found = Devices(world, "distributed", world.size if on_gpus else 0, asked)
    return replace(found, note=_smaller(config, found, 0))


def _smaller(config: SEOConfig, found: Devices, there: int) -> str | None:
    """What to say where fewer devices take part than were asked for."""
    if found.num_devices >= found.asked:
        return None
    what = f"{found.world.size} processes" if found.world.size > 1 else "one GPU" if found.num_gpus == 1 else "one CPU"
    if found.num_gpus > 1:
        what = f"{found.num_gpus} GPUs"
    batch = effective_batch(config, found.asked)
    more = f"; torchrun --nproc_per_node={there} script.py uses all {there}" if there > found.num_devices else ""
    return f"{found.asked} GPUs were asked for, {what} will train: the effective batch stays {batch}{more}"


def effective_batch(config: SEOConfig, asked: int, batch_size: int | None = None) -> int:
    """Texts per optimizer step."""
    if config.effective_batch_size is not None:
        return config.effective_batch_size
    return (batch_size or config.batch_size) * asked * config.gradient_accumulation_steps


def precision(config: SEOConfig, devices: Devices) -> str:
    """no, fp16 or bf16; what is chosen by itself is 32 bit on the CPU, which is slower in 16."""
    if not config.use_mixed_precision or not config.mixed_precision_enabled:
        return "no"
    if config.mixed_precision_dtype != "auto":
        return PRECISIONS[config.mixed_precision_dtype]
    if not devices.num_gpus:
        return "no"
    # Asked of NVML, because asking CUDA would start it, and fix which GPUs this process sees.
    newest = max((gpu.capability or "" for gpu in visible_gpus()), key=_version, default="")
    return "bf16" if _version(newest) >= (8, 0) else "fp16"


def _version(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split(".") if part.isdecimal())


def join_others(config: SEOConfig, devices: Devices) -> None:
    """Meets the other processes, where there are some."""
    world = devices.world
    if world.size > 1:
        setup_distributed_training(
            world.rank, world.size, world.master_addr, str(world.master_port), backend=config.distributed_backend
        )


def trainer_config(config: SEOConfig, devices: Devices, batch_size: int, **more: Any) -> MultiGPUConfig:
    """The same in the words of unisono.multi_gpu, which trains."""
    launched = devices.world.size > 1
    number = None if launched and devices.num_gpus else devices.num_gpus
    return MultiGPUConfig(
        title=f"AdvancedLLMSEOEngine ({config.model_name})",
        num_gpus=None if devices.gpu_ids else number,
        gpu_ids=list(devices.gpu_ids) if devices.gpu_ids else None,
        min_memory_gb=0.0,
        strategy=devices.strategy,
        backend=config.distributed_backend,
        pin_memory=config.dataloader_pin_memory,
        num_workers=config.dataloader_num_workers,
        persistent_workers=config.dataloader_persistent_workers,
        find_unused_parameters=config.find_unused_parameters,
        broadcast_buffers=config.broadcast_buffers,
        bucket_cap_mb=config.bucket_cap_mb,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        static_graph=config.static_graph,
        batch_size=batch_size,
        global_batch_size=effective_batch(config, devices.asked, batch_size),
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        grad_clip=config.max_grad_norm,
        mixed_precision=precision(config, devices),
        activation_checkpointing=config.gradient_checkpointing,
        scheduler_interval="epoch" if config.lr_scheduler == "plateau" else "step",
        seed=config.seed,
        settings={
            "sync_batch_norm": config.sync_batch_norm,
            "tensorboard": config.tensorboard_logging,
            **config.settings,
        },
        **more,
    )


def memory(devices: Devices) -> dict[str, dict[str, int]]:
    """Bytes of this process on its devices."""
    if devices.num_gpus and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}  # nothing is there yet
    several = devices.num_gpus if devices.strategy == "dataparallel" else 1
    first = devices.device
    return memory_of([first] if several == 1 else [torch.device("cuda", number) for number in range(several)])
