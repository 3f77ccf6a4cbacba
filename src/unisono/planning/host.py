"""Reads the total and free memory of the host, or of the container in which the process runs."""

from __future__ import annotations

from pathlib import Path

_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_host_memory() -> int:
    """Returns how many bytes a process can still allocate."""
    available = _meminfo().get("MemAvailable", 0)
    for limit, used in _LIMITS:
        try:
            available = min(available, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # ValueError: the limit is "max", which means no limit
            continue
    return max(available, 1)


def whole_host_memory() -> int:
    """Returns how many bytes all processes together can use, including swap."""
    memory = _meminfo()
    whole = memory.get("MemTotal", 0) + memory.get("SwapTotal", 0)
    for limit, _ in _LIMITS:
        try:
            whole = min(whole, int(Path(limit).read_text()) + memory.get("SwapTotal", 0))
        except (OSError, ValueError):
            continue
    return whole or 2**63


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return {}
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
