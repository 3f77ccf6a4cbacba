"""Lists the GPUs of this machine, chooses the GPUs of a run, and locks them.

GPUs are identified by UUID, because nvidia-smi and CUDA (with CUDA_VISIBLE_DEVICES) may number them differently. NVML
lists GPUs without creating a CUDA context, so nothing here imports torch. The choice is a pure function of a list of
GPUs; a lock file per GPU keeps two runs that start at the same time from choosing the same one.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from unisono.errors import UserError

GB = 10**9
_BUSY_PROCESS_BYTES = 2**30
_FREE_FRACTION = 0.8

T = TypeVar("T")


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    bytes: int
    name: str


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML describes it. Values that NVML does not report are 0, None or empty."""

    index: int
    """Number in PCI order, as in nvidia-smi."""
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    utilization: int | None = None
    """Percentage of the last second in which a kernel was running."""
    processes: tuple[GpuProcess, ...] = ()
    pci_bus_id: str = ""
    links: tuple[str, ...] = ()
    capability: str = ""
    """Compute capability, such as 9.0."""

    @property
    def is_free(self) -> bool:
        """Whether the GPU seems unused: no process with over 1 GiB, and at least 80 % of the memory free."""
        # Also check the memory, because NVML does not list the processes of other containers.
        busy = any(process.bytes > _BUSY_PROCESS_BYTES for process in self.processes)
        return not busy and self.free_bytes >= _FREE_FRACTION * self.total_bytes


@dataclass(frozen=True)
class Choice:
    """The GPUs of a run. If `gpus` is empty, the run trains on the CPU."""

    gpus: tuple[Gpu, ...]
    requested: int
    """Number of GPUs that the user requested, which may exceed the number available; 0 if the user accepts the CPU."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver, and the newest CUDA version that it supports."""

    version: str
    cuda: tuple[int, int]


def num_cpu_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- list GPUs -----------------------------------------------------------------------------------------------------


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Returns the GPUs this process may use: those in CUDA_VISIBLE_DEVICES if it is set, otherwise all."""
    return apply_mask(environ.get("CUDA_VISIBLE_DEVICES"), read_gpus())


def apply_mask(mask: str | None, gpus: Sequence[Gpu]) -> list[Gpu]:
    """Returns the GPUs in a CUDA_VISIBLE_DEVICES value, in its order. Like CUDA, stops at the first bad entry."""
    if mask is None:
        return list(gpus)
    visible: list[Gpu] = []
    for position, entry in enumerate(mask.split(",")):
        entry = entry.strip()
        if entry.startswith("MIG-"):
            visible.append(_mig_slice(entry, position))
            continue
        matches = [gpu for gpu in gpus if _matches(entry, gpu)]
        if len(matches) != 1 or matches[0] in visible:
            break
        visible.append(matches[0])
    return visible


def _matches(entry: str, gpu: Gpu) -> bool:
    if entry.isdecimal():
        return int(entry) == gpu.index
    return entry.startswith("GPU-") and gpu.uuid.lower().startswith(entry.lower())


@contextmanager
def open_nvml() -> Iterator[Any]:
    """Yields NVML, or None if the library, the driver or the permission is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
        nvml: Any = pynvml
    except Exception:  # an import error, an NVMLError or a missing symbol: NVML is not available
        nvml = None
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


def read_gpus() -> list[Gpu]:
    """Returns every GPU of the machine in PCI order; an empty list without an NVIDIA driver."""
    with open_nvml() as nvml:
        if nvml is None:
            return []
        count = query_nvml(nvml, 0, nvml.nvmlDeviceGetCount)
        handles = [query_nvml(nvml, None, nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        gpus = [_read(nvml, handle, index) for index, handle in enumerate(handles) if handle is not None]
    return [gpu for gpu in gpus if gpu.uuid]


def read_driver() -> Driver | None:
    """Returns the driver's version, or None without a driver."""
    with open_nvml() as nvml:
        if nvml is None:
            return None
        cuda = query_nvml(nvml, 0, nvml.nvmlSystemGetCudaDriverVersion_v2)
        version = _text(query_nvml(nvml, "unknown", nvml.nvmlSystemGetDriverVersion))
        return Driver(version, (cuda // 1000, cuda % 1000 // 10))


def _mig_slice(uuid: str, index: int) -> Gpu:
    """Describes a MIG slice, which NVML finds only by UUID. CUDA may accept a slice that NVML does not find."""
    with open_nvml() as nvml:
        handle = None if nvml is None else query_nvml(nvml, None, nvml.nvmlDeviceGetHandleByUUID, uuid)
        if handle is None:
            return Gpu(index=index, uuid=uuid, name="MIG slice", total_bytes=0, free_bytes=0)
        return replace(_read(nvml, handle, index), uuid=uuid)


def query_nvml(nvml: Any, default: T, query: Callable[..., T], *arguments: Any) -> T:
    """Returns the result of an NVML query, or `default` if the GPU, driver or container does not support the query."""
    try:
        return query(*arguments)
    except nvml.NVMLError:
        return default


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value  # bytes in nvidia-ml-py < 11.500


def _read(nvml: Any, handle: Any, index: int) -> Gpu:
    memory = query_nvml(nvml, None, nvml.nvmlDeviceGetMemoryInfo, handle)
    load = query_nvml(nvml, None, nvml.nvmlDeviceGetUtilizationRates, handle)
    pci = query_nvml(nvml, None, nvml.nvmlDeviceGetPciInfo, handle)
    running: list[Any] = query_nvml(nvml, [], nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return Gpu(
        index=index,
        uuid=_text(query_nvml(nvml, "", nvml.nvmlDeviceGetUUID, handle)),
        name=_text(query_nvml(nvml, "unknown", nvml.nvmlDeviceGetName, handle)),
        total_bytes=int(memory.total) if memory else 0,
        free_bytes=int(memory.free) if memory else 0,
        utilization=int(load.gpu) if load else None,
        processes=tuple(
            # usedGpuMemory is None under WSL and in some containers
            GpuProcess(
                p.pid, int(p.usedGpuMemory or 0), _text(query_nvml(nvml, "", nvml.nvmlSystemGetProcessName, p.pid))
            )
            for p in running
        ),
        pci_bus_id=_text(pci.busId) if pci else "",
        links=_links(nvml, handle),
        capability=".".join(map(str, query_nvml(nvml, (), nvml.nvmlDeviceGetCudaComputeCapability, handle))),
    )


def _links(nvml: Any, handle: Any) -> tuple[str, ...]:
    links = []
    nvlinks = [query_nvml(nvml, 0, nvml.nvmlDeviceGetNvLinkState, handle, i) for i in range(nvml.NVML_NVLINK_MAX_LINKS)]
    if any(nvlinks):
        links.append(f"NVLink x{sum(nvlinks)}")
    # Read the maximum instead of the current value, because an idle GPU reduces its link to generation 1.
    generation = query_nvml(nvml, 0, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    width = query_nvml(nvml, 0, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    if generation:
        links.append(f"PCIe {generation} x{width}")
    return tuple(links)


# --- choose GPUs ----------------------------------------------------------------------------------------------------


def choose(
    request: str, gpus: Sequence[Gpu], *, min_memory_gb: float = 0.0, locked: Collection[str] = frozenset()
) -> Choice:
    """Returns the GPUs for a `--gpus` value: all, auto, a count, or ids; `locked` are the UUIDs that other runs use."""
    request = request.strip()
    count = int(request) if re.fullmatch("[0-9]{1,9}", request) else None
    if count == 0:
        return Choice((), 0)
    ids = _ids(request) if count is None and request not in ("all", "auto") else None
    if not gpus and ids is not None:
        raise UserError(
            f"GPU {ids[0]} does not exist: there is no CUDA device here, or CUDA_VISIBLE_DEVICES hides all of them; "
            "pass --gpus 0 to train on the CPU"
        )
    if not gpus:
        # Some wrapper scripts always pass 1, so the message does not quote a flag that the user may not have typed.
        named = "" if request in ("auto", "1") else f" for --gpus {request}"
        return Choice((), count or 0, (f"no CUDA device{named}: training on the CPU",))
    if ids is not None:
        return _by_id(ids, gpus, min_memory_gb, locked)
    large_enough = [gpu for gpu in gpus if gpu.free_bytes >= min_memory_gb * GB]
    if not large_enough:
        emptiest = max(gpus, key=lambda gpu: gpu.free_bytes)
        raise UserError(
            f"no GPU has {min_memory_gb:g} GB of free memory (min_memory_gb); GPU {emptiest.index} has the most, "
            f"{emptiest.free_bytes / GB:.1f} GB; lower min_memory_gb, or wait until a GPU is free"
        )
    if request == "all":
        return Choice(tuple(large_enough), len(large_enough), _lock_warnings(large_enough, locked))
    by_preference = sorted(
        large_enough, key=lambda gpu: (gpu.uuid in locked, -gpu.free_bytes, gpu.utilization or 0, gpu.index)
    )
    unlocked = [gpu for gpu in by_preference if gpu.uuid not in locked]
    if request == "auto":
        chosen = [gpu for gpu in unlocked if gpu.is_free]
        requested = max(1, len(chosen))
    else:
        requested = count or 1
        chosen = unlocked[:requested]
    warnings = []
    if not chosen:
        chosen = by_preference[:1]
        warnings.append(f"no GPU is free: using GPU {chosen[0].index}, which has the most free memory, and sharing it")
    if len(chosen) < requested:
        num_locked = len(large_enough) - len(unlocked)
        in_use = f" ({num_locked} in use by other runs)" if num_locked else ""
        warnings.append(
            f"{requested} GPUs requested, using {len(chosen)} of {len(gpus)}{in_use}: "
            "gradient accumulation keeps the effective batch"
        )
    return Choice(tuple(sorted(chosen, key=gpus.index)), requested, tuple(warnings))


def _ids(request: str) -> list[str]:
    """Splits "0,2" or "3," into ids, each an index or a UUID. A number without a comma would be a count."""
    ids = [part.strip() for part in request.removesuffix(",").split(",")]
    if not all(re.fullmatch("[0-9]{1,9}", each) or each.startswith(("GPU-", "MIG-")) for each in ids):
        raise UserError(f"gpus {request!r} is not all, auto, a count such as 2, or ids such as 0,2 (a single id: 3,)")
    return ids


def _by_id(ids: Sequence[str], gpus: Sequence[Gpu], min_memory_gb: float, locked: Collection[str]) -> Choice:
    taken: list[Gpu] = []
    for each in ids:
        matches = [gpu for gpu in gpus if _matches(each, gpu) or each == gpu.uuid]
        if len(matches) != 1:
            indices = ", ".join(str(gpu.index) for gpu in gpus)
            raise UserError(
                f"GPU {each} does not exist or is hidden by CUDA_VISIBLE_DEVICES; "
                f"use one of {indices} (see unisono gpus)"
            )
        gpu = matches[0]
        if gpu in taken:
            raise UserError(f"GPU {each} is listed twice; list each once (for two ranks on one GPU use --nproc)")
        if gpu.free_bytes < min_memory_gb * GB:
            raise UserError(
                f"GPU {each} has {gpu.free_bytes / GB:.1f} GB free, less than min_memory_gb {min_memory_gb:g}; "
                "choose another GPU, or lower min_memory_gb"
            )
        taken.append(gpu)
    return Choice(tuple(taken), len(taken), _lock_warnings(taken, locked))


def _lock_warnings(gpus: Sequence[Gpu], locked: Collection[str]) -> tuple[str, ...]:
    shared = [str(gpu.index) for gpu in gpus if gpu.uuid in locked]
    return (f"another unisono run uses GPU {', '.join(shared)}: sharing it",) if shared else ()


def child_environment(choice: Choice) -> dict[str, str]:
    """Returns the environment variables that make a rank see exactly the chosen GPUs, in order."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in choice.gpus)}


# --- lock GPUs -------------------------------------------------------------------------------------------------------


class GpuLock:
    """Locks GPUs for one run with files in the temp folder. The kernel releases the locks when the process ends."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.gettempdir())
        self._owner = os.getpid()
        self._files: dict[str, int] = {}

    def acquire(self, uuid: str) -> bool:
        """Locks the GPU and returns True, or returns False at once if another run has locked it."""
        if uuid in self._files:
            return True
        try:
            file = self._open(uuid)
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return False
        self._files[uuid] = file
        return True

    def release(self, uuid: str | None = None) -> None:
        """Unlocks one GPU, or all."""
        for each in [uuid] if uuid is not None else list(self._files):
            file = self._files.pop(each)
            if os.getpid() == self._owner:
                # Closing is not enough, because forked loader workers share the open file and thereby the lock. For the
                # same reason only the process that took the lock may release it.
                fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def __del__(self) -> None:
        self.release()

    def path(self, uuid: str) -> Path:
        """Returns the lock file of a GPU."""
        return self.folder / f"unisono-gpu-{uuid.replace('/', '_')}.lock"

    def _open(self, uuid: str) -> int:
        path = self.path(uuid)
        try:
            # Try without O_CREAT first, because in a sticky folder Linux refuses O_CREAT for another user's file
            # (the sysctl fs.protected_regular).
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            os.fchmod(file, 0o644)  # overrides the umask, because other users must be able to open the file
            return file


def locked_gpus(gpus: Sequence[Gpu], folder: Path | None = None) -> set[str]:
    """Returns the UUIDs of those GPUs that a run has locked."""
    probe = GpuLock(folder)
    locked = {gpu.uuid for gpu in gpus if probe.path(gpu.uuid).exists() and not probe.acquire(gpu.uuid)}
    probe.release()
    return locked


def choose_and_lock(
    request: str, gpus: Sequence[Gpu], *, min_memory_gb: float = 0.0, folder: Path | None = None
) -> tuple[Choice, GpuLock]:
    """Chooses and locks GPUs; if another run locks one of them first, it chooses again."""
    lock = GpuLock(folder)
    locked: set[str] = set()
    while True:
        choice = choose(request, gpus, min_memory_gb=min_memory_gb, locked=locked)
        lost = {gpu.uuid for gpu in choice.gpus if not lock.acquire(gpu.uuid)}
        if lost <= locked:
            break
        locked |= lost
    for uuid in set(lock._files) - {gpu.uuid for gpu in choice.gpus}:
        lock.release(uuid)
    return choice, lock
