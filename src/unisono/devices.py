"""Which GPUs exist, how free they are, and which to take.

GPUs are named by UUID from here on: an index means one thing to nvidia-smi and another to CUDA under a mask. NVML tells
what is there without making a CUDA context, so nothing here imports torch. Choosing is a pure function of a list of
GPUs; a lock file per GPU keeps two runs that start together from choosing the same one.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from unisono.errors import UserError

GB = 10**9
_BUSY_PROCESS_BYTES = 2**30
_FREE_PART = 0.8

T = TypeVar("T")


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    bytes: int
    name: str


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML describes it; what NVML does not know is 0, None or empty."""

    index: int
    """Number in PCI order, as nvidia-smi counts."""
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    utilization: int | None = None
    """Percent of the last second in which something was computed."""
    processes: tuple[GpuProcess, ...] = ()
    pci_bus_id: str = ""
    links: tuple[str, ...] = ()
    capability: str = ""
    """Compute capability, such as 9.0."""

    @property
    def is_free(self) -> bool:
        """Whether nobody seems to work on it: no process with over 1 GiB, and at least 80 % of the memory free."""
        # Memory counts too: NVML does not see the processes of other containers.
        busy = any(process.bytes > _BUSY_PROCESS_BYTES for process in self.processes)
        return not busy and self.free_bytes >= _FREE_PART * self.total_bytes


@dataclass(frozen=True)
class Choice:
    """The GPUs a run takes; none means that it trains on the CPU."""

    gpus: tuple[Gpu, ...]
    asked: int
    """How many GPUs were asked for, which may be more than there are; 0 where the CPU will do."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver and the newest CUDA version it can run."""

    version: str
    cuda: tuple[int, int]


# --- what is there ----------------------------------------------------------------------------------------------------


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The GPUs this process may use: all, or those CUDA_VISIBLE_DEVICES names; none without an NVIDIA driver."""
    return apply_mask(environ.get("CUDA_VISIBLE_DEVICES"), read_gpus())


def apply_mask(mask: str | None, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that a CUDA_VISIBLE_DEVICES value names, in its order; like CUDA, it ends at the first bad entry."""
    if mask is None:
        return list(gpus)
    visible: list[Gpu] = []
    for place, entry in enumerate(mask.split(",")):
        entry = entry.strip()
        if entry.startswith("MIG-"):
            visible.append(_mig_slice(entry, place))
            continue
        matches = [gpu for gpu in gpus if _names(entry, gpu)]
        if len(matches) != 1 or matches[0] in visible:
            break
        visible.append(matches[0])
    return visible


def _names(entry: str, gpu: Gpu) -> bool:
    if entry.isdecimal():
        return int(entry) == gpu.index
    return entry.startswith("GPU-") and gpu.uuid.lower().startswith(entry.lower())


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, or None where the library, the driver or the permission is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
        nvml: Any = pynvml
    except Exception:  # an import error, an NVMLError or a library without the symbol: all mean "not there"
        nvml = None
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


def read_gpus() -> list[Gpu]:
    """Every GPU of the machine in PCI order; an empty list without an NVIDIA driver."""
    with _nvml() as nvml:
        if nvml is None:
            return []
        count = _ask(nvml, 0, nvml.nvmlDeviceGetCount)
        handles = [_ask(nvml, None, nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        gpus = [_read(nvml, handle, index) for index, handle in enumerate(handles) if handle is not None]
    return [gpu for gpu in gpus if gpu.uuid]


def read_driver() -> Driver | None:
    """The driver's version, or None without one."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        cuda = _ask(nvml, 0, nvml.nvmlSystemGetCudaDriverVersion_v2)
        version = _text(_ask(nvml, "unknown", nvml.nvmlSystemGetDriverVersion))
        return Driver(version, (cuda // 1000, cuda % 1000 // 10))


def _mig_slice(uuid: str, place: int) -> Gpu:
    """A slice of a GPU, which NVML finds by its id only; CUDA takes the id even where NVML knows nothing about it."""
    with _nvml() as nvml:
        handle = None if nvml is None else _ask(nvml, None, nvml.nvmlDeviceGetHandleByUUID, uuid)
        if handle is None:
            return Gpu(index=place, uuid=uuid, name="MIG slice", total_bytes=0, free_bytes=0)
        return replace(_read(nvml, handle, place), uuid=uuid)


def _ask(nvml: Any, default: T, query: Callable[..., T], *arguments: Any) -> T:
    """One NVML answer; every query may be unsupported on some card, driver or container."""
    try:
        return query(*arguments)
    except nvml.NVMLError:
        return default


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value  # bytes before nvidia-ml-py 11.500


def _read(nvml: Any, handle: Any, index: int) -> Gpu:
    memory = _ask(nvml, None, nvml.nvmlDeviceGetMemoryInfo, handle)
    load = _ask(nvml, None, nvml.nvmlDeviceGetUtilizationRates, handle)
    pci = _ask(nvml, None, nvml.nvmlDeviceGetPciInfo, handle)
    running: list[Any] = _ask(nvml, [], nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return Gpu(
        index=index,
        uuid=_text(_ask(nvml, "", nvml.nvmlDeviceGetUUID, handle)),
        name=_text(_ask(nvml, "unknown", nvml.nvmlDeviceGetName, handle)),
        total_bytes=int(memory.total) if memory else 0,
        free_bytes=int(memory.free) if memory else 0,
        utilization=int(load.gpu) if load else None,
        processes=tuple(
            # usedGpuMemory is None under WSL and in some containers
            GpuProcess(p.pid, int(p.usedGpuMemory or 0), _text(_ask(nvml, "", nvml.nvmlSystemGetProcessName, p.pid)))
            for p in running
        ),
        pci_bus_id=_text(pci.busId) if pci else "",
        links=_links(nvml, handle),
        capability=".".join(map(str, _ask(nvml, (), nvml.nvmlDeviceGetCudaComputeCapability, handle))),
    )


def _links(nvml: Any, handle: Any) -> tuple[str, ...]:
    links = []
    nvlinks = [_ask(nvml, 0, nvml.nvmlDeviceGetNvLinkState, handle, i) for i in range(nvml.NVML_NVLINK_MAX_LINKS)]
    if any(nvlinks):
        links.append(f"NVLink x{sum(nvlinks)}")
    # The maximum, not the current one: an idle GPU turns its link down to generation 1.
    generation = _ask(nvml, 0, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    width = _ask(nvml, 0, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    if generation:
        links.append(f"PCIe {generation} x{width}")
    return tuple(links)


# --- which to take ----------------------------------------------------------------------------------------------------


def choose(
    request: str, gpus: Sequence[Gpu], *, min_memory_gb: float = 0.0, locked: Collection[str] = frozenset()
) -> Choice:
    """The GPUs that a `--gpus` value means: all, auto, a count, or ids; `locked` are UUIDs that other runs hold."""
    request = request.strip()
    count = int(request) if request.isdecimal() else None
    if count == 0:
        return Choice((), 0)
    ids = _ids(request) if count is None and request not in ("all", "auto") else None
    if not gpus and ids is not None:
        raise UserError(
            f"GPU {ids[0]} does not exist: there is no CUDA device here, or CUDA_VISIBLE_DEVICES hides all; "
            "--gpus 0 trains on the CPU"
        )
    if not gpus:
        named = "" if request == "auto" else f" for --gpus {request}"
        return Choice((), count or 0, (f"no CUDA device{named}: training on the CPU",))
    if ids is not None:
        return _by_id(ids, gpus, min_memory_gb, locked)
    roomy = [gpu for gpu in gpus if gpu.free_bytes >= min_memory_gb * GB]
    if not roomy:
        best = max(gpus, key=lambda gpu: gpu.free_bytes)
        raise UserError(
            f"no GPU has min_memory_gb {min_memory_gb:g} free (the most is {best.free_bytes / GB:.1f} GB on GPU "
            f"{best.index}); ask for less, or wait until one is free"
        )
    if request == "all":
        return Choice(tuple(roomy), len(roomy), _lock_warnings(roomy, locked))
    emptiest = sorted(roomy, key=lambda gpu: (gpu.uuid in locked, -gpu.free_bytes, gpu.utilization or 0, gpu.index))
    unlocked = [gpu for gpu in emptiest if gpu.uuid not in locked]
    if request == "auto":
        taken = [gpu for gpu in unlocked if gpu.is_free]
        wanted = max(1, len(taken))
    else:
        wanted = count or 1
        taken = unlocked[:wanted]
    warnings = []
    if not taken:
        taken = emptiest[:1]
        warnings.append(f"no GPU is free: taking the emptiest, GPU {taken[0].index}, beside what runs on it")
    if len(taken) < wanted:
        held = f" ({len(roomy) - len(unlocked)} held by other runs)" if len(unlocked) < len(roomy) else ""
        warnings.append(
            f"asked for {wanted} GPUs, taking {len(taken)} of {len(gpus)}{held}: accumulation keeps the effective batch"
        )
    return Choice(tuple(sorted(taken, key=gpus.index)), wanted, tuple(warnings))


def _ids(request: str) -> list[str]:
    """The parts of "0,2" or "3," (a single id needs its comma, or it would be a count); a UUID stands for itself."""
    ids = [part.strip() for part in request.removesuffix(",").split(",")]
    if not all(each.isdecimal() or each.startswith(("GPU-", "MIG-")) for each in ids):
        raise UserError(f"gpus {request!r} is not all, auto, a count such as 2, or ids such as 0,2 (a single id: 3,)")
    return ids


def _by_id(ids: Sequence[str], gpus: Sequence[Gpu], min_memory_gb: float, locked: Collection[str]) -> Choice:
    taken: list[Gpu] = []
    for each in ids:
        matches = [gpu for gpu in gpus if _names(each, gpu) or each == gpu.uuid]
        if len(matches) != 1:
            there = ", ".join(str(gpu.index) for gpu in gpus)
            raise UserError(
                f"GPU {each} does not exist or is hidden by CUDA_VISIBLE_DEVICES; there are {there} (see unisono gpus)"
            )
        gpu = matches[0]
        if gpu in taken:
            raise UserError(f"GPU {each} is named twice; name each once (for two ranks on one GPU use --nproc)")
        if gpu.free_bytes < min_memory_gb * GB:
            raise UserError(
                f"GPU {each} has {gpu.free_bytes / GB:.1f} GB free, less than min_memory_gb {min_memory_gb:g}; "
                "take another, or ask for less"
            )
        taken.append(gpu)
    return Choice(tuple(taken), len(taken), _lock_warnings(taken, locked))


def _lock_warnings(gpus: Sequence[Gpu], locked: Collection[str]) -> tuple[str, ...]:
    shared = [str(gpu.index) for gpu in gpus if gpu.uuid in locked]
    return (f"another unisono run holds GPU {', '.join(shared)}: sharing",) if shared else ()


def child_environment(choice: Choice) -> dict[str, str]:
    """The variables that make a rank see exactly the chosen GPUs, in order."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in choice.gpus)}


# --- and hold it ------------------------------------------------------------------------------------------------------


class GpuLock:
    """Holds GPUs for one run, as locked files in the temp folder; the kernel lets go when the process ends."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.gettempdir())
        self._owner = os.getpid()
        self._files: dict[str, int] = {}

    def acquire(self, uuid: str) -> bool:
        """Holds the GPU unless another run does; never waits."""
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
        """Lets go of one GPU, or of all."""
        for each in [uuid] if uuid is not None else list(self._files):
            file = self._files.pop(each)
            if os.getpid() == self._owner:
                # Closing is not enough: forked loader workers share the open file, and so the lock. For the same reason
                # they must not unlock it themselves.
                fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def __del__(self) -> None:
        self.release()

    def path(self, uuid: str) -> Path:
        """The file that stands for a GPU."""
        return self.folder / f"unisono-gpu-{uuid.replace('/', '_')}.lock"

    def _open(self, uuid: str) -> int:
        path = self.path(uuid)
        try:
            # First without O_CREAT: in a sticky folder Linux refuses it on another user's file (protected_regular).
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            os.fchmod(file, 0o644)  # whatever the umask: other users must be able to open it
            return file


def locked_gpus(gpus: Sequence[Gpu], folder: Path | None = None) -> set[str]:
    """The UUIDs of those GPUs that a run holds right now."""
    probe = GpuLock(folder)
    locked = {gpu.uuid for gpu in gpus if probe.path(gpu.uuid).exists() and not probe.acquire(gpu.uuid)}
    probe.release()
    return locked


def take(
    request: str, gpus: Sequence[Gpu], *, min_memory_gb: float = 0.0, folder: Path | None = None
) -> tuple[Choice, GpuLock]:
    """Chooses GPUs and holds them: what another run grabbed first counts as locked, and the choice is made again."""
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
