"""Describes the machine and the versions that a measurement depends on."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def machine() -> dict[str, object]:
    """The processor, memory and GPUs of this machine."""
    import torch

    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2**20),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.release()}",
        "load_average": round(os.getloadavg()[0], 2),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """The versions of python, torch's CUDA and these packages."""
    import torch

    versions_by_package = {"python": platform.python_version()}
    for package in packages:
        try:
            versions_by_package[package] = version(package)
        except PackageNotFoundError:
            versions_by_package[package] = "not installed"
    if torch.version.cuda:
        versions_by_package["cuda"] = torch.version.cuda
    return versions_by_package


def code(*benchmarks: Path) -> str:
    """A fingerprint of unisono's code and of these files, because results of other code must not be reused."""
    files = [*sorted((Path(__file__).resolve().parent.parent / "src").rglob("*.py")), *benchmarks]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def without_folders(words: Sequence[str], *more: str) -> list[str]:
    """A command without paths of this machine; `more`: further flags that a path follows."""
    folders = {"--output", "--cache", *more}
    return [word for before, word in zip(["", *words], words, strict=False) if not folders & {before, word}]


def depends_on(result: Mapping[str, Any]) -> list[str]:
    """Machine, versions, date and command of a result, as the first list of its page."""
    facts = result["machine"]
    hardware = f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gib']} GiB"
    return [
        f"- Machine: {', '.join([*facts['gpus'], hardware])}; {facts['system']}; "
        f"load {facts['load_average']} at the start",
        f"- Versions: {', '.join(f'{name} {number}' for name, number in result['versions'].items())}",
        f"- Date: {result['date']}",
        f"- Command: `{result['command']}`",
    ]


def _field(file: str, name: str) -> str | None:
    """The value of the first `name: value` line."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), None)
