"""`unisono doctor`: checks that this machine can train, and tells the user what to do about each problem.

`inspect_machine` collects all facts once in a `Machine`, and each check is a small pure function of these facts. After
that, real processes run an all-reduce over gloo and, if there are GPUs, over NCCL. The exit code is 1 if a check fails;
warnings do not affect it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

from unisono.cli.arguments import Parser
from unisono.cluster import allreduce, environment
from unisono.devices import (
    GB,
    Choice,
    Driver,
    Gpu,
    apply_mask,
    child_environment,
    num_cpu_cores,
    read_driver,
    read_gpus,
)
from unisono.errors import EXIT_DIFFERENCE, EXIT_DONE, TrainingFailed, UserError

OLDEST_TORCH, FIRST_UNTESTED_TORCH = (2, 9), (2, 14)
GIB = 2**30
RANK_MODULE = "unisono.engine.start.rank"
CORE_PACKAGES = ("torch", "numpy", "safetensors", "pyyaml", "rich", "tensorboard", "nvidia-ml-py")


@dataclass(frozen=True)
class Check:
    """The result of one check; the fields are the keys of `--json`."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""
    """What to do if the status is not ok."""


@dataclass(frozen=True)
class Machine:
    """Facts about this machine that the checks evaluate."""

    packages: Mapping[str, str | None] = field(default_factory=dict)
    """Version of each package that unisono uses; None if it is not installed."""
    optional: Mapping[str, str] = field(default_factory=dict)
    """Optional packages, each with the extra of unisono that requires it, such as clips."""
    torch_error: str = ""
    cuda_build: str | None = None
    cuda_works: bool = False
    bf16: bool = True
    nccl: str | None = None
    driver: Driver | None = None
    gpus: Sequence[Gpu] = ()
    mask: str | None = None
    cores: int = 1
    memory_bytes: int = 0
    shm_bytes: int | None = None
    disk_bytes: int = 100 * GIB
    open_files: int = 65536
    orphans: Sequence[str] = ()

    @property
    def visible(self) -> list[Gpu]:
        """The GPUs that CUDA_VISIBLE_DEVICES does not hide."""
        return apply_mask(self.mask, self.gpus)


# --- facts ------------------------------------------------------------------------------------------------------------


def inspect_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """Collects the facts that the checks need."""
    packages, optional = _packages()
    build: str | None = None
    works, bf16, nccl, error = False, True, None, ""
    try:
        import torch
    except (ImportError, OSError) as failure:  # OSError: a CUDA library cannot be loaded
        error = f"({str(failure).splitlines()[0]})"
    else:
        build, works = torch.version.cuda, torch.cuda.is_available()
        bf16 = not works or torch.cuda.is_bf16_supported(including_emulation=False)
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if build else None  # type: ignore[no-untyped-call]
    return Machine(
        packages=packages,
        optional=optional,
        torch_error=error,
        cuda_build=build,
        cuda_works=works,
        bf16=bf16,
        nccl=nccl,
        driver=read_driver(),
        gpus=read_gpus(),
        mask=environ.get("CUDA_VISIBLE_DEVICES"),
        cores=num_cpu_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        disk_bytes=shutil.disk_usage(".").free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        orphans=orphaned_ranks(),
    )


def _packages() -> tuple[dict[str, str | None], dict[str, str]]:
    """Returns the version of each required package, and the extra of each optional one, from unisono's metadata."""
    try:
        requirements = metadata.requires("unisono") or []
    except metadata.PackageNotFoundError:  # run from a source tree
        requirements = list(CORE_PACKAGES)
    packages: dict[str, str | None] = {}
    optional: dict[str, str] = {}
    for requirement in requirements:
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)", requirement)
        if extra and extra[1] == "dev":
            continue
        if extra and name not in packages:
            optional[name] = extra[1]
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    return packages, optional


def orphaned_ranks(proc: Path = Path("/proc")) -> list[str]:
    """Returns the unisono ranks whose launcher no longer runs, each as "pid command"."""
    first = proc / "1" / "cmdline"
    # In a container the launcher itself may be process 1. The children of such a launcher are not orphans.
    launcher_is_first = os.access(first, os.R_OK) and b"unisono" in first.read_bytes()
    orphans = []
    for folder in proc.glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if RANK_MODULE not in command:
                continue
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:  # the process has exited in the meantime
            continue
        if parent == "1" and not launcher_is_first:
            orphans.append(f"{folder.name} {command}")
    return orphans


# --- checks -----------------------------------------------------------------------------------------------------------


def _warn_unless(is_ok: bool, name: str, finding: str, advice: str) -> Check:
    return Check(name, "ok", finding) if is_ok else Check(name, "warn", finding, advice)


def check_python(machine: Machine) -> Check:
    return Check("python", "ok", f"{platform.python_version()} ({sys.executable})")


def check_torch(machine: Machine) -> Check:
    version = machine.packages.get("torch")
    if version is None or machine.torch_error:
        finding = f"{version or 'not installed'} {machine.torch_error}".strip()
        return Check("torch", "fail", finding, "torch cannot be imported; run pip install 'torch>=2.9,<2.14'")
    build = f"CUDA {machine.cuda_build}, NCCL {machine.nccl}" if machine.cuda_build else "CPU build"
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TORCH:
        return Check("torch", "fail", f"{version} ({build})", "too old; run pip install 'torch>=2.9,<2.14'")
    if numbers >= FIRST_UNTESTED_TORCH:
        return Check(
            "torch",
            "warn",
            f"{version} ({build})",
            "unisono has not been tested with this newer version; if something fails, use torch<2.14",
        )
    return Check("torch", "ok", f"{version} ({build})")


def check_packages(machine: Machine) -> Check:
    others = {name: version for name, version in machine.packages.items() if name != "torch"}
    extras = machine.optional
    installed = [f"{name} {version}" for name, version in others.items() if version]
    absent = [f"{name} (only for unisono[{extras[name]}])" for name in extras if others.get(name, "") is None]
    missing = [name for name, version in others.items() if version is None and name not in extras]
    finding = ", ".join(installed) + (f"; not installed: {', '.join(absent)}" if absent else "")
    if missing:
        return Check(
            "packages", "fail", f"{finding}; missing: {', '.join(missing)}", f"run pip install {' '.join(missing)}"
        )
    return Check("packages", "ok", finding)


def check_cuda(machine: Machine) -> Check:
    """Checks that torch, the driver and CUDA_VISIBLE_DEVICES together allow the use of the GPUs."""
    gpus, driver = machine.gpus, machine.driver
    if not gpus and machine.cuda_build and not machine.cuda_works:
        finding = f"torch is built for CUDA {machine.cuda_build}, but there is no NVIDIA driver or GPU"
        advice = "training runs on the CPU; on a GPU machine check nvidia-smi (in a container: --gpus all)"
        return Check("cuda", "warn", finding, advice)
    if not gpus:
        return Check("cuda", "ok", "works" if machine.cuda_works else "no NVIDIA GPU: training runs on the CPU")
    finding = f"driver {driver.version}, CUDA up to {driver.cuda[0]}.{driver.cuda[1]}" if driver else "driver unknown"
    if not machine.visible:
        hidden = f"CUDA_VISIBLE_DEVICES={machine.mask!r} hides all {len(gpus)} GPUs"
        return Check("cuda", "warn", hidden, "unset CUDA_VISIBLE_DEVICES, or name GPUs that exist (unisono gpus)")
    if machine.cuda_build is None:
        return Check("cuda", "fail", f"{finding}, but torch is a CPU build", "install torch's CUDA build: pytorch.org")
    if driver and 0 < driver.cuda[0] < int(machine.cuda_build.split(".")[0]):
        advice = f"update the driver, or install a torch built for CUDA {driver.cuda[0]}"
        return Check("cuda", "fail", f"{finding}, too old for torch's CUDA {machine.cuda_build}", advice)
    if not machine.cuda_works:
        advice = 'python -c "import torch; torch.cuda.init()" prints the reason; often a driver update needs a restart'
        return Check("cuda", "fail", f"{finding}, but torch cannot use the GPUs", advice)
    return Check("cuda", "ok", finding)


def check_gpus(machine: Machine) -> Check:
    names = [
        f"{gpu.index}: {gpu.name}, {gpu.free_bytes / GB:.0f} of {gpu.total_bytes / GB:.0f} GB free"
        for gpu in machine.visible
    ]
    advice = "this GPU has no bf16 support: use --mixed_precision fp16"
    return _warn_unless(machine.bf16 or not names, "gpus", "; ".join(names) or "none", advice)


def check_host(machine: Machine) -> Check:
    return Check("host", "ok", f"{machine.cores} CPU cores, {machine.memory_bytes / GIB:.1f} GiB memory")


def check_shm(machine: Machine) -> Check:
    if machine.shm_bytes is None:
        return Check("shared memory", "ok", "no /dev/shm on this system")
    finding = f"/dev/shm {machine.shm_bytes / GIB:.2f} GiB"
    advice = "loader workers may die with a bus error: use docker run --shm-size=8g (or --ipc=host), or --num_workers 0"
    return _warn_unless(machine.shm_bytes >= GIB, "shared memory", finding, advice)


def check_disk(machine: Machine) -> Check:
    finding = f"{machine.disk_bytes / GIB:.1f} GiB free in the current folder"
    advice = "checkpoints may not fit: free some space, or use an --output_dir on a larger disk"
    return _warn_unless(machine.disk_bytes >= 5 * GIB, "disk", finding, advice)


def check_open_files(machine: Machine) -> Check:
    unlimited = machine.open_files == resource.RLIM_INFINITY
    finding = "no limit" if unlimited else f"{machine.open_files} open files per process"
    is_enough = unlimited or machine.open_files >= 1024
    return _warn_unless(is_enough, "open files", finding, "loader workers may need more: run ulimit -n 4096")


def check_orphans(machine: Machine) -> Check:
    if not machine.orphans:
        return Check("orphans", "ok", "no orphaned ranks")
    pids = " ".join(each.split()[0] for each in machine.orphans)
    advice = f"these ranks lost their launcher and may occupy GPU memory; if you do not need them, run kill {pids}"
    return Check("orphans", "warn", "; ".join(machine.orphans), advice)


def check_launcher(environ: Mapping[str, str] = os.environ) -> Check:
    try:
        return Check("launcher", "ok", environment.detect(environ).describe())
    except UserError as error:
        finding, _, advice = str(error).partition("; ")
        return Check("launcher", "fail", finding, advice)


def check_output_dir(output_dir: str) -> Check:
    """Checks that a run can write to this folder, with a temporary file in the nearest existing parent."""
    path = Path(output_dir).absolute()
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return Check("output folder", "ok", f"{path} is writable")
    except OSError as error:
        return Check("output folder", "fail", f"{nearest}: {error.strerror}", "choose another --output_dir")


def check_all_reduce(backend: Literal["gloo", "nccl"], machine: Machine, timeout_s: float = 60.0) -> Check:
    """Runs an all-reduce of two CPU ranks over gloo, or of one rank per visible GPU over NCCL."""
    if backend == "gloo":
        num_ranks, name, environ = 2, "all-reduce, 2 CPU ranks over gloo", None
        advice = (
            "check that this host's name resolves (ping $(hostname)), or set GLOO_SOCKET_IFNAME, for instance to lo"
        )
    else:
        num_ranks = len(machine.visible)
        name = f"all-reduce, {num_ranks} GPU rank{'s' * (num_ranks > 1)} over NCCL"
        environ = child_environment(Choice(tuple(machine.visible), num_ranks))
        advice = "run NCCL_DEBUG=INFO unisono doctor for details; NCCL needs free GPU memory and /dev/shm"
    try:
        measured = allreduce.measure(backend, num_ranks, timeout_s=timeout_s, environ=environ)
    except TrainingFailed as failure:
        return Check(name, "fail", str(failure), advice)
    return Check(name, "ok", f"{measured.latency_us:.0f} µs latency, {measured.gb_per_s:.2f} GB/s")


# --- command ----------------------------------------------------------------------------------------------------------

INSTALLED = (check_python, check_torch, check_packages)
VISIBLE = (check_cuda, check_gpus, check_host, check_shm, check_disk, check_open_files, check_orphans)


def run_checks(output_dir: str | None = None) -> dict[str, list[Check]]:
    """Runs all checks and returns the results by section."""
    machine = inspect_machine()
    sections = {
        "Installed": [check(machine) for check in INSTALLED],
        "This machine": [*(check(machine) for check in VISIBLE), check_launcher()],
    }
    if output_dir is not None:
        sections["This machine"].append(check_output_dir(output_dir))
    if machine.packages.get("torch") and not machine.torch_error:
        sections["All-reduce test"] = [check_all_reduce("gloo", machine)]
        if machine.cuda_works and machine.visible:
            sections["All-reduce test"].append(check_all_reduce("nccl", machine))
    return sections


def main(argv: list[str]) -> int:
    """Runs the command; returns 1 if a check fails."""
    parser = Parser(
        "doctor",
        "Check this machine: installed packages, GPUs, memory, disk and limits, and a real all-reduce between "
        "processes. For each problem, print what to do. Exit codes: 0 healthy or warnings only, 1 a check failed.",
    )
    parser.add_argument("--output_dir", metavar="FOLDER", help="also check that a run can write to this folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    options = parser.parse(argv)
    sections = run_checks(options.output_dir)
    checks = [check for section in sections.values() for check in section]
    healthy = all(check.status != "fail" for check in checks)
    if options.json:
        print(json.dumps({"healthy": healthy, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _print(sections, healthy)
    return EXIT_DONE if healthy else EXIT_DIFFERENCE


def _print(sections: Mapping[str, Sequence[Check]], healthy: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    marks = {"ok": "[green]✓[/]", "warn": "[yellow]![/]", "fail": "[red]✗[/]"}
    console = Console(highlight=False)
    for title, checks in sections.items():
        console.print(f"\n[bold]{title}[/]")
        table = Table.grid(padding=(0, 1))
        for check in checks:
            table.add_row(marks[check.status], escape(check.name), escape(check.found))
        console.print(table)
    problems = [check for checks in sections.values() for check in checks if check.status != "ok"]
    console.print("\n[bold]Problems[/]")
    for check in problems:
        console.print(f"{marks[check.status]} {escape(check.name)}: {escape(check.found)}\n  → {escape(check.advice)}")
    if not problems:
        console.print("[green]✓[/] none")
    elif healthy:
        console.print("Warnings only: this machine can train.")
