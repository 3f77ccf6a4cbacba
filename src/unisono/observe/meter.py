"""Where the time of a step goes, told from the host's clock alone.

No phase waits for the GPU. A single step's phases therefore say little on a GPU (the host only enqueues work), but over
the steps between two logged ones, at which the host reads the loss, the wall clock is the truth.
"""

from __future__ import annotations

import resource
import statistics
import sys
from collections.abc import Sequence
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class _Phase:
    """A stop-watch made once per name: `contextlib.contextmanager` would cost more than all the rest."""

    __slots__ = ("count", "entered", "seconds")

    def __init__(self) -> None:
        self.seconds, self.count, self.entered = 0.0, 0, 0.0

    def __enter__(self) -> None:
        self.entered = perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.seconds += perf_counter() - self.entered
        self.count += kind is None  # a step that failed and is replayed counts once


class Meter:
    """Adds up the time of the phases of a step: "data" (waiting for it), "step", and "aside" for what is not training.

    "own" is what this rank needs itself before it waits for others.

    Evaluation, previews and waiting for a save belong to "aside": they are taken out of the time of the steps.
    """

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}
        self._since: float | None = None

    def phase(self, name: str) -> _Phase:
        """Times the body of a `with` statement under this name."""
        if self._since is None:  # not at construction: building the model is no part of the first step
            self._since = perf_counter()
        phase = self._phases.get(name)
        if phase is None:
            phase = self._phases[name] = _Phase()
        return phase

    def add(self, name: str, seconds: float) -> None:
        """Adds time that was measured elsewhere to a phase."""
        self.phase(name).seconds += seconds

    def interval(self, samples: int) -> dict[str, float]:
        """Speed since the last call, in which `samples` samples were trained on: samples_per_s, step_ms, data_wait_ms.

        Times are means per step; a further phase of yours appears as `<name>_ms`. Empty if no step ended since.
        """
        now = perf_counter()
        seconds = {name: phase.seconds for name, phase in self._phases.items()}
        steps = self._phases["step"].count if "step" in self._phases else 0
        if not steps or self._since is None:
            return {}
        elapsed = max(now - self._since - seconds.pop("aside", 0.0), 1e-9)
        for phase in self._phases.values():
            phase.seconds, phase.count = 0.0, 0
        self._since = now
        del seconds["step"]
        per_step = {f"{name}_ms": spent / steps * 1e3 for name, spent in seconds.items() if name != "data"}
        return {
            "samples_per_s": samples / elapsed,
            "step_ms": elapsed / steps * 1e3,
            "data_wait_ms": seconds.get("data", 0.0) / steps * 1e3,
            **per_step,
        }


def slowest(per_rank_ms: Sequence[float]) -> tuple[int, float]:
    """The slowest rank, and how many times as long as the middle one of the others it takes."""
    rank = max(range(len(per_rank_ms)), key=per_rank_ms.__getitem__)
    others = [ms for other, ms in enumerate(per_rank_ms) if other != rank]
    middle = statistics.median(others) if others else per_rank_ms[rank]
    if middle == 0:
        return rank, 1.0 if per_rank_ms[rank] == 0 else float("inf")
    return rank, per_rank_ms[rank] / middle


def gpu_memory_gib(device: torch.device) -> float | None:
    """The most memory that tensors took on this GPU so far, in GiB; None on the CPU."""
    if device.type != "cuda":
        return None
    import torch

    return torch.cuda.max_memory_allocated(device) / 2**30


def host_memory_gib() -> float:
    """The most memory that this process took so far (its resident set), in GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes on macOS, KiB on Linux
