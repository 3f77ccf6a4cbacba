"""Lists and selects GPUs, creates the process group, and locks the devices of a run.

On a machine without GPUs, the lists are empty and training uses the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
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
_earlier_values: dict[str, str | None] = {}  # environment variables before world_for changed them; None: not set


def get_gpu_info() -> dict[str, Any]:
    """Describes the GPUs that this process may use: count, devices, and memory and compute capability by GPU id."""
    devices = [_described(gpu) for gpu in visible_gpus()]
    memory = ("memory_total", "memory_allocated", "memory_free")
    return {
        "count": len(devices),
        "devices": devices,
        "memory": {gpu["id"]: {name.removeprefix("memory_"): gpu[name] for name in memory} for gpu in devices},
        "capabilities": {gpu["id"]: gpu["compute_capability"] for gpu in devices},
    }


def _described(gpu: Gpu) -> dict[str, Any]:
    return {
        "id": gpu.index,
        "name": gpu.name,
        "memory_total": gpu.total_bytes,
        "memory_allocated": gpu.total_bytes - gpu.free_bytes,  # memory that all processes together have allocated
        "memory_free": gpu.free_bytes,
        "compute_capability": gpu.capability,
        "utilization": gpu.utilization,
        "uuid": gpu.uuid,
    }


def select_optimal_gpus(num_gpus: int | None = None, min_memory_gb: float = 4.0) -> list[int]:
    """Returns the ids of the `num_gpus` GPUs (default: all) with the most free memory, and at least `min_memory_gb`."""
    MultiGPUConfig(num_gpus=num_gpus, min_memory_gb=min_memory_gb)  # checks the values
    candidates = [gpu for gpu in visible_gpus() if gpu.free_bytes >= min_memory_gb * GB]
    candidates.sort(key=lambda gpu: (-gpu.free_bytes, gpu.utilization or 0, gpu.index))
    return sorted(gpu.index for gpu in candidates[:num_gpus])


def setup_cuda_environment() -> None:
    """Makes CUDA number the GPUs like nvidia-smi. Call it before CUDA is initialised."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def setup_distributed_training(
    rank: int, world_size: int, master_addr: str = "localhost", master_port: str | int = "12355", **more: Any
) -> None:
    """Creates the process group with this process as rank `rank` of `world_size`; returns when all ranks have joined.

    Under torchrun or another launcher, the launcher's values are used, and a different `rank` or `world_size` raises an
    error. `backend` and `local_rank` can be passed as well.
    """
    config = MultiGPUConfig(
        rank=rank, world_size=world_size, master_addr=master_addr, master_port=str(master_port), **more
    )
    world = world_for(config)
    import torch.distributed as dist

    from unisono.cluster.backend import Backend
    from unisono.cluster.process_group import join_process_group
    from unisono.engine.build.device import find_placement
    from unisono.settings import Settings

    if not dist.is_initialized():
        # In this API, "nccl" means NCCL where it is possible, as in existing scripts. Ranks that share a GPU use gloo.
        backend: Backend = "gloo" if config.backend == "gloo" else "auto"
        join_process_group(world, find_placement(world, Settings()).device, alone=True, backend=backend)


def cleanup_distributed_training() -> None:
    """Destroys the process group, if there is one."""
    import sys

    if "torch.distributed" in sys.modules:
        from unisono.cluster.process_group import leave_process_group

        leave_process_group()
    _restore(_earlier_values)
    _earlier_values.clear()


def _restore(variables: Mapping[str, str | None]) -> None:
    """Restores earlier values of environment variables; None removes a variable."""
    for name, value in variables.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def world_for(config: MultiGPUConfig) -> World:
    """Returns the world of this process, which its launcher or else the config defines; by default a single process."""
    world = detect()
    if world.launcher == "plain" and config.rank is not None and config.world_size is not None:
        local = config.rank if config.local_rank is None else config.local_rank
        values = (config.rank, config.world_size, local, config.world_size, config.master_addr, config.master_port)
        for name, value in zip(_VARIABLES, values, strict=True):
            _earlier_values.setdefault(name, os.environ.get(name))
            os.environ[name] = str(value)
        return detect()
    for name, value, actual in (("rank", config.rank, world.rank), ("world_size", config.world_size, world.size)):
        if world.launcher != "plain" and value not in (None, actual):
            raise ConfigError(f"{name} {value}, but the launcher ({world.launcher}) set {actual}; do not set {name}")
    return world


@dataclass(frozen=True)
class TakenDevices:
    """The devices of a run in this process."""

    strategy: str
    gpus: str  # value of the engine's setting `gpus`; "0" means the CPU
    requested: int | None = None  # number of requested devices, from which the effective batch is computed
    environ: dict[str, str] | None = None  # environment variables that hide other GPUs from CUDA
    device: str | None = None  # UUID of the GPU to use, if CUDA also sees others
    lock: GpuLock | None = None  # lock on the GPUs, which lasts as long as this object exists
    remarks: tuple[str, ...] = ()

    @contextmanager
    def visible(self) -> Iterator[None]:
        """Makes CUDA initialise with only the GPUs of the run, or selects the run's only GPU."""
        earlier = {name: os.environ.get(name) for name in self.environ or ()}
        os.environ.update(self.environ or {})
        try:
            if self.device is not None:
                _use(self.device)
            yield
        finally:
            _restore(earlier)


def take_devices(
    config: MultiGPUConfig, strategy: str, world: World, *, global_batch: int | None = None
) -> TakenDevices:
    """Selects and locks the devices for a run in this process; `strategy` is the engine's name.

    `global_batch` is the number of samples per step; None if it follows from the number of devices.
    """
    if world.launcher != "plain":
        return _devices_of_rank(config, strategy)
    gpus = visible_gpus()
    batch_remark = _SAME_BATCH if global_batch is None else f"a step still takes {global_batch} samples"
    requested = config.world_size or (len(config.gpu_ids) if config.gpu_ids else config.num_gpus)
    if config.num_gpus == 0 or not gpus:
        if config.gpu_ids:
            raise ConfigError(f"gpu_ids {config.gpu_ids}: this machine has no GPU; remove gpu_ids to train on the CPU")
        remarks = (f"the config requests {requested} devices, but there is only the CPU; {batch_remark}",)
        return TakenDevices(strategy, "0", requested or 1, remarks=remarks if (requested or 1) > 1 else ())
    uses_several = strategy in ("dp", "auto")  # the other strategies use one GPU per process
    request = "auto" if config.num_gpus is None else str(config.num_gpus)
    if config.gpu_ids:
        request = ",".join(map(str, config.gpu_ids if uses_several else config.gpu_ids[:1])) + ","
    elif not uses_several:
        request = "1"
    choice, lock = choose_and_lock(request, _usable_by_cuda(gpus), min_memory_gb=config.min_memory_gb)
    notes = [warning.replace(_SAME_BATCH, batch_remark) for warning in choice.warnings]
    requested = choice.requested if uses_several else requested or 1
    if uses_several and len(choice.gpus) > 1:
        strategy = "dp"
        notes.append(f"one process drives {len(choice.gpus)} GPUs; {_FASTER.format(len(choice.gpus))} is faster")
    elif not uses_several and requested > 1:
        notes.append(
            f"one process uses one of the {requested} requested GPUs, and {batch_remark}; "
            f"{_FASTER.format(requested)} or launch_multi_gpu_training uses them all"
        )
    uuids = ",".join(gpu.uuid for gpu in choice.gpus) + ","
    if strategy == "dp":
        return TakenDevices(strategy, uuids, requested, _hide_others(choice), None, lock, tuple(notes))
    # Do not hide other GPUs: this process could never use a GPU that is hidden when CUDA is initialised.
    return TakenDevices(strategy, uuids, requested, None, choice.gpus[0].uuid, lock, tuple(notes))


_SAME_BATCH = "accumulation keeps the effective batch"  # replaces a phrase in the remark from unisono.devices
_FASTER = "torchrun --nproc_per_node={} script.py"


def _devices_of_rank(config: MultiGPUConfig, strategy: str) -> TakenDevices:
    """Returns the device of a rank under a launcher; the local rank is an index into `gpu_ids` or all GPUs."""
    if config.num_gpus == 0:
        return TakenDevices(strategy, "0")
    if not config.gpu_ids:
        return TakenDevices(strategy, "auto")
    request = ",".join(map(str, config.gpu_ids)) + ","
    choice, _ = choose_and_lock(request, _usable_by_cuda(visible_gpus()), min_memory_gb=config.min_memory_gb)
    return TakenDevices(strategy, "auto", environ=_hide_others(choice))


def _hide_others(choice: Choice) -> dict[str, str]:
    """Returns variables that hide all other GPUs; raises ConfigError if CUDA is already initialised with other GPUs."""
    if not _cuda_is_initialised():
        return child_environment(choice)
    visible = _uuids_in_cuda()
    if {gpu.uuid for gpu in choice.gpus} != set(visible):
        raise ConfigError(
            f"GPUs {[gpu.index for gpu in choice.gpus]} can no longer be selected: CUDA is already initialised in this "
            f"process with {len(visible)}; create the trainer before you move anything to a GPU, or set "
            "CUDA_VISIBLE_DEVICES"
        )
    return {}


def _usable_by_cuda(gpus: list[Gpu]) -> list[Gpu]:
    """Returns the GPUs that CUDA can use: all GPUs before CUDA is initialised, otherwise only the GPUs that it sees."""
    if not _cuda_is_initialised():
        return gpus
    visible = _uuids_in_cuda()
    return [gpu for gpu in gpus if gpu.uuid in visible] or gpus


def _uuids_in_cuda() -> list[str]:
    """Returns the UUIDs of the GPUs in CUDA's order, which may differ from NVML's."""
    import torch

    return [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in range(torch.cuda.device_count())]


def _use(uuid: str) -> None:
    import torch

    visible = _uuids_in_cuda()
    if uuid in visible:  # a MIG slice has a different UUID here and is the only visible device
        torch.cuda.set_device(visible.index(uuid))


def _cuda_is_initialised() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def memory_of(devices: list[torch.device]) -> dict[str, dict[str, int]]:
    """Returns this process's memory on each device, in bytes: allocated, reserved, max_allocated, total (and free)."""
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
    """Releases GPU memory that PyTorch caches, so that other processes can use it; returns the bytes freed per device.

    A run does not need this, because PyTorch reuses its cache. Clearing the cache between epochs slows training down.
    """
    import gc

    import torch

    gc.collect()
    if not _cuda_is_initialised():
        return {}
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    before = {device: torch.cuda.memory_reserved(device) for device in devices}
    torch.cuda.empty_cache()
    return {f"gpu_{device.index}": old - torch.cuda.memory_reserved(device) for device, old in before.items()}


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
