"""Plans the ranks to launch on this machine, and their devices."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.config.resolve import Resolved
from unisono.devices import GpuLock, child_environment, choose_and_lock, num_cpu_cores, visible_gpus
from unisono.errors import ConfigError
from unisono.settings import LaunchSettings, Settings


@dataclass(frozen=True)
class DevicePlan:
    """The ranks to start on this machine, and their devices."""

    ranks: int
    environ: dict[str, str]
    requested_devices: int | None  # number of devices that the user requested on this machine
    remarks: list[str]
    lock: GpuLock | None  # reserves our GPUs while it exists

    def applied_to(self, resolved: Resolved) -> Resolved:
        """Returns the settings of the ranks: gpus is 0 if the plan uses no GPU."""
        if self.environ.get("CUDA_VISIBLE_DEVICES"):
            return resolved
        return resolved.with_values(resolved.sources["gpus"], gpus="0")


def plan_devices(resolved: Resolved) -> DevicePlan:
    """Chooses the devices of this machine by the settings, and reserves them for this run."""
    settings = resolved.build(Settings)
    launch, strategy = settings.launch, settings.parallel.strategy
    is_one_process = strategy in ("single", "dp")
    check_ranks(launch)
    if launch.nproc is not None and not resolved.explicit("gpus"):
        _check_backend(launch, on_gpu=False)
        ranks, cores = 1 if is_one_process else launch.nproc, num_cpu_cores()
        remarks = [f"{ranks} CPU ranks on {cores} cores: slower than {cores} ranks"] if ranks > cores else []
        return DevicePlan(ranks, {"CUDA_VISIBLE_DEVICES": ""}, None, remarks, None)
    choice, lock = choose_and_lock(launch.gpus, visible_gpus(), min_memory_gb=launch.min_memory_gb)
    _check_backend(launch, on_gpu=bool(choice.gpus))
    remarks = list(choice.warnings)
    requested: int | None = max(choice.requested, 1)
    if strategy == "single" or launch.nproc is not None:
        requested = None
    if strategy == "single" and len(choice.gpus) > 1:
        remarks.append(f"strategy single uses one GPU of the {len(choice.gpus)} chosen")
    ranks = 1 if is_one_process else launch.nproc or len(choice.gpus) or 1
    return DevicePlan(ranks, child_environment(choice), requested, remarks, lock)


def _check_backend(launch: LaunchSettings, *, on_gpu: bool) -> None:
    """Rejects NCCL for ranks on the CPU."""
    if launch.backend != "nccl" or on_gpu:
        return
    reason, advice = "and there is none here", "remove --backend: CPU ranks use gloo"
    if launch.gpus == "0":
        reason = "and --gpus 0 trains on the CPU"
    elif launch.nproc is not None and visible_gpus():
        reason, advice = "and --nproc alone starts CPU ranks", "add --gpus 1, for instance, or remove --backend"
    raise ConfigError(f"backend nccl needs a GPU, {reason}; {advice}")


def check_ranks(launch: LaunchSettings) -> None:
    """Rejects far more processes than there are cores: each needs a few hundred MiB before it trains."""
    cores = num_cpu_cores()
    most = cores * launch.max_ranks_per_core
    if launch.nproc is not None and launch.nproc > most:
        raise ConfigError(
            f"nproc {launch.nproc}: this machine has {cores} core{'s' * (cores > 1)}, which allows at most {most} "
            f"ranks (max_ranks_per_core {launch.max_ranks_per_core}); use --nproc {cores}, or raise the limit with "
            f"--max_ranks_per_core {-(-launch.nproc // cores)}"
        )
