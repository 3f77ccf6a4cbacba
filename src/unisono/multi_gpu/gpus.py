"""Which GPUs there are, how free they are, which to take, and how processes find each other.

Without a GPU every answer is an empty one, and training takes place on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unisono.cluster.environment import World, detect
from unisono.devices import GB, Choice, Gpu, GpuLock, child_environment, choose_and_lock, visible_gpus
from unisono.errors import ConfigError
from unisono.multi_gpu.config import MultiGPUConfig

if TYPE_CHECKING:
    import torch

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_before: dict[str, str | None] = {}  # what they were before we set them


def get_gpu_info() -> dict[str, Any]:
    """The GPUs of this machine that this process may use: count, devices, and memory and capability by their ids."""
    devices = [_described(gpu) for gpu in visible_gpus()]
    memory = ("memory_total", "memory_allocated", "memory_free")
    return {
        "count": len(devices),
        "devices": devices,
        "memory": {each["id"]: {name.removeprefix("memory_"): each[name] for name in memory} for each in devices},
        "capabilities": {each["id"]: each["compute_capability"] for each in devices},
    }


def _described(gpu: Gpu) -> dict[str, Any]:
    return {
        "id": gpu.index,
        "name": gpu.name,
        "memory_total": gpu.total_bytes,
        "memory_allocated": gpu.total_bytes - gpu.free_bytes,  # by everybody, not by this process alone
        "memory_free": gpu.free_bytes,
        "compute_capability": gpu.capability,
        "utilization": gpu.utilization,
        "uuid": gpu.uuid,
    }


def select_optimal_gpus(num_gpus: int | None = None, min_memory_gb: float = 4.0) -> list[int]:
    """The ids of the emptiest GPUs with at least so much free memory: as many as asked for, or all; [] without any."""
    MultiGPUConfig(num_gpus=num_gpus, min_memory_gb=min_memory_gb)  # refuses what makes no sense
    roomy = [gpu for gpu in visible_gpus() if gpu.free_bytes >= min_memory_gb * GB]
    emptiest = sorted(roomy, key=lambda gpu: (-gpu.free_bytes, gpu.utilization or 0, gpu.index))
    return sorted(gpu.index for gpu in emptiest[:num_gpus])


def setup_cuda_environment() -> None:
    """Makes CUDA count the GPUs as nvidia-smi does; to be called before CUDA is used. Nothing else needs to be set."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def setup_distributed_training(
    rank: int, world_size: int, master_addr: str = "localhost", master_port: str | int = "12355", **more: Any
) -> None:
    """Makes this process rank `rank` of `world_size`; returns when all of them are there.

    Under torchrun, or another launcher, which has said all this already, it only joins the others. Backend and number
    of workers are MultiGPUConfig's; `backend` and `local_rank` may be given here, too.
    """
    config = MultiGPUConfig(
        rank=rank, world_size=world_size, master_addr=master_addr, master_port=str(master_port), **more
    )
    world = world_for(config)
    import torch.distributed as dist

    from unisono.cluster.process_group import join_process_group
    from unisono.engine.build.device import find_placement
    from unisono.settings import Settings

    if not dist.is_initialized():
        join_process_group(world, find_placement(world, Settings()).device, alone=True, gloo=config.backend == "gloo")


def cleanup_distributed_training() -> None:
    """Leaves the other processes; harmless where nothing was set up."""
    import sys

    if "torch.distributed" in sys.modules:
        from unisono.cluster.process_group import leave_process_group

        leave_process_group()
    for name, value in _before.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    _before.clear()


def world_for(config: MultiGPUConfig) -> World:
    """The processes that this one belongs to: as the launcher says, else as the config does, else it is alone."""
    world = detect()
    if world.launcher == "plain" and config.rank is not None and config.world_size is not None:
        local = config.rank if config.local_rank is None else config.local_rank
        told = (config.rank, config.world_size, local, config.world_size, config.master_addr, config.master_port)
        for name, value in zip(_VARIABLES, told, strict=True):
            _before.setdefault(name, os.environ.get(name))
            os.environ[name] = str(value)
        return detect()
    told_by = f"the launcher ({world.launcher}) says"
    for name, given, found in (("rank", config.rank, world.rank), ("world_size", config.world_size, world.size)):
        if world.launcher != "plain" and given not in (None, found):
            raise ConfigError(f"{name} {given}, but {told_by} {found}; leave {name} out")
    return world


@dataclass(frozen=True)
class Taken:
    """The devices of a run that takes place in this process."""

    strategy: str
    gpus: str  # the engine's setting: "0" is the CPU
    asked: int | None = None  # devices whose effective batch is kept
    environ: dict[str, str] | None = None
    device: str | None = None  # the one GPU of those that CUDA sees
    lock: GpuLock | None = None  # keeps other runs off these GPUs while it lives
    remarks: tuple[str, ...] = ()

    @contextmanager
    def visible(self) -> Iterator[None]:
        """While CUDA is being started: it sees the GPUs of the run, or uses the one."""
        before = {name: os.environ.get(name) for name in self.environ or ()}
        os.environ.update(self.environ or {})
        try:
            if self.device is not None:
                _use(self.device)
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def take_devices(config: MultiGPUConfig, strategy: str, world: World, *, whole_batch: int | None = None) -> Taken:
    """The devices for a run in this process; `strategy` is the engine's name for it.

    `whole_batch`: the samples of a step, where a loader or the config says them, whatever the number of devices.
    """
    if world.launcher != "plain":
        return _of_rank(config, strategy)
    found = visible_gpus()
    kept = _KEPT if whole_batch is None else f"a step takes {whole_batch} samples all the same"
    asked = config.world_size or (len(config.gpu_ids) if config.gpu_ids else config.num_gpus)
    if config.num_gpus == 0 or not found:
        if config.gpu_ids:
            raise ConfigError(f"gpu_ids {config.gpu_ids}: there is no GPU here; leave it out to train on the CPU")
        devices = asked or 1
        note = [f"{devices} devices were asked for, and there is one CPU: {kept}"]
        return Taken(strategy, "0", devices, remarks=tuple(note[: devices > 1]))
    several = strategy in ("dp", "auto")  # the others use one GPU per process, and this is one process
    request = "auto" if config.num_gpus is None else str(config.num_gpus)
    if config.gpu_ids:
        request = ",".join(map(str, config.gpu_ids if several else config.gpu_ids[:1])) + ","
    elif not several:
        request = "1"
    choice, lock = choose_and_lock(request, _of_cuda(found), min_memory_gb=config.min_memory_gb)
    remarks = [each.replace(_KEPT, kept) for each in choice.warnings]
    wanted = choice.requested if several else asked or 1
    if several and len(choice.gpus) > 1:
        strategy = "dp"
        remarks.append(f"one process for {len(choice.gpus)} GPUs; {_FASTER.format(len(choice.gpus))} is faster")
    elif not several and wanted > 1:
        remarks.append(
            f"one process uses one GPU of the {wanted} asked for, and {kept}; "
            f"{_FASTER.format(wanted)} uses them all, launch_multi_gpu_training too"
        )
    names = ",".join(gpu.uuid for gpu in choice.gpus) + ","
    if strategy != "dp":
        # Not by hiding the others: what CUDA does not see when it starts, this process never sees again.
        return Taken(strategy, names, wanted, None, choice.gpus[0].uuid, lock, tuple(remarks))
    return Taken(strategy, names, wanted, _hiding_others(choice), None, lock, tuple(remarks))


_KEPT = "accumulation keeps the effective batch"
_FASTER = "torchrun --nproc_per_node={} script.py"


def _of_rank(config: MultiGPUConfig, strategy: str) -> Taken:
    """Under a launcher each rank has a GPU by its number; `gpu_ids` says among which."""
    if config.num_gpus == 0:
        return Taken(strategy, "0")
    if not config.gpu_ids:
        return Taken(strategy, "auto")
    request = ",".join(map(str, config.gpu_ids)) + ","
    choice, _ = choose_and_lock(request, _of_cuda(visible_gpus()), min_memory_gb=config.min_memory_gb)
    return Taken(strategy, "auto", environ=_hiding_others(choice))


def _hiding_others(choice: Choice) -> dict[str, str]:
    """The variables that show CUDA the chosen GPUs only; refused where it runs already and sees others."""
    if not _cuda_runs():
        return child_environment(choice)
    seen = _seen_by_cuda()
    if {gpu.uuid for gpu in choice.gpus} != set(seen):
        raise ConfigError(
            f"GPUs {[gpu.index for gpu in choice.gpus]} cannot be chosen any more: CUDA already runs in this process "
            f"with {len(seen)}; make this trainer before anything is moved to a GPU, or set CUDA_VISIBLE_DEVICES"
        )
    return {}


def _of_cuda(found: list[Gpu]) -> list[Gpu]:
    """Those that CUDA sees, where it runs already."""
    if not _cuda_runs():
        return found
    seen = _seen_by_cuda()
    return [gpu for gpu in found if gpu.uuid in seen] or found


def _seen_by_cuda() -> list[str]:
    """The GPUs by CUDA's own numbers, which need not be NVML's."""
    import torch

    return [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in range(torch.cuda.device_count())]


def _use(uuid: str) -> None:
    import torch

    seen = _seen_by_cuda()
    if uuid in seen:  # a slice of a GPU has another name, and is the only one that is seen
        torch.cuda.set_device(seen.index(uuid))


def _cuda_runs() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def memory_of(devices: list[torch.device]) -> dict[str, dict[str, int]]:
    """Bytes that this process has on each device: allocated, reserved, the most so far, and what there is in all."""
    import torch

    from unisono.observe.meter import host_memory_gib

    stats: dict[str, dict[str, int]] = {}
    for device in devices:
        if device.type != "cuda":
            pages = {name: os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_PAGE_SIZE")}
            now, peak = _resident_bytes(), int(host_memory_gib() * 2**30)
            total = pages["SC_PHYS_PAGES"] * pages["SC_PAGE_SIZE"]
            stats["cpu"] = {"allocated": now, "reserved": now, "max_allocated": max(now, peak), "total": total}
            continue
        free, total = torch.cuda.mem_get_info(device)
        stats[f"gpu_{device.index}"] = {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "max_allocated": torch.cuda.max_memory_allocated(device),
            "free": free,
            "total": total,
        }
    return stats


def clear_memory_cache() -> dict[str, int]:
    """Gives memory that PyTorch holds and does not use back to the GPU, for other processes; bytes freed, by device.

    The run itself needs no such call: what is held is used again, and clearing it between epochs makes training slower.
    """
    import gc

    import torch

    gc.collect()
    if not _cuda_runs():
        return {}
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    before = {device: torch.cuda.memory_reserved(device) for device in devices}
    torch.cuda.empty_cache()
    return {f"gpu_{device.index}": held - torch.cuda.memory_reserved(device) for device, held in before.items()}


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
