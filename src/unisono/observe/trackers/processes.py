"""Starts the processes of a run's trackers, from the process of the main rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from unisono.observe.side_process.parent import SideProcesses


def start_trackers(
    trackers: Sequence[str],
    folder: Path,
    message: Callable[[str], None],
    *,
    project: str | None = None,
    offline: bool = False,
    timeout_s: float = 60.0,
) -> SideProcesses:
    """Starts a process for each tracker; `message` prints a line for the user and is called from other threads."""
    processes = SideProcesses(folder, message, event="tracker", timeout_s=timeout_s)
    for name in trackers:
        label = name.rpartition(":")[2]
        order = {"name": name, "label": label, "folder": str(folder), "project": project, "offline": offline}
        processes.start(f"track {label}", "unisono.observe.trackers.process", order)
    return processes
