"""Records what torch's CUDA allocator does during a profile, as JSON with the Python stack of every allocation.

torch writes such snapshots as pickle files, which unisono neither writes nor reads: unpickling a file may run any code.
The JSON has the same content: `segments` with their blocks, and `device_traces` with every event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

MOST_EVENTS = 100_000
DEEPEST_STACK = 24


class AllocatorHistory:
    """The history of the CUDA allocator between `start` and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.content: dict[str, Any] | None = None
        """The snapshot, after `stop`."""

    def start(self) -> None:
        """Begins to record allocations with their Python stacks."""
        torch.cuda.memory._record_memory_history(
            "all", context="all", stacks="python", max_entries=MOST_EVENTS, device=self._device
        )

    def stop(self) -> None:
        """Takes the snapshot and ends the recording."""
        self.content = snapshot_as_json(torch.cuda.memory._snapshot(self._device))
        torch.cuda.memory._record_memory_history(None, device=self._device)


def snapshot_as_json(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a snapshot of the allocator in JSON's types, with short stacks and without torch's own settings."""
    return {
        "segments": [_plain(segment) for segment in snapshot.get("segments", ())],
        "device_traces": [[_plain(event) for event in events] for events in snapshot.get("device_traces", ())],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(key): [_frame(frame) for frame in inner[:DEEPEST_STACK]] if key == "frames" else _plain(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _frame(frame: Mapping[str, Any]) -> str:
    return f"{frame.get('filename')}:{frame.get('line')} {frame.get('name')}"
