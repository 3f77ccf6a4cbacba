"""Collects the conditions of a measurement: date, machine, load and versions."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from unisono import __version__
from unisono.devices import num_cpu_cores, visible_gpus


def conditions() -> dict[str, Any]:
    """Returns everything about the machine and its current state that the measurements depend on."""
    versions = {"unisono": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "gpus": [gpu.name for gpu in visible_gpus()],
            "processor": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
            "cores": num_cpu_cores(),
            "memory_gib": round(int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2**20),
            "system": f"{platform.system()} {platform.release()}",
            "load_average": round(os.getloadavg()[0], 2),
        },
        "versions": versions,
    }


def _field(file: str, name: str) -> str | None:
    """Returns the value of the first `name: value` line of a file."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), None)
