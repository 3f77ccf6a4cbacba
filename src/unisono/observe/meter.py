"""Measures the phases of a step with the host's clock only.

Measuring a phase does not wait for the GPU. The host only enqueues work for the GPU, so the phases of a single step
mean little. At every logged step the host reads the loss and thereby synchronises with the GPU, so the mean time over
the steps between two logged ones is accurate.
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
    """A stopwatch for one phase, reused in every step. `contextlib.contextmanager` would take longer than the rest."""

    __slots__ = ("added", "count", "entered", "seconds")

    def __init__(self) -> None:
        self.seconds, self.count, self.entered, self.added = 0.0, 0, 0.0, 0

    def __enter__(self) -> None:
        self.entered = perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.seconds += perf_counter() - self.entered
        self.count += kind is None  # a step that fails and is replayed counts once


class Meter:
    """Adds up the time of the phases of a step.

    The phase "data" is the wait for data, "own" the time that this rank needs before it waits for other ranks, "comm"
    the time that it waits for them, and "step" the whole step. "aside" is all time that is not training (evaluation,
    previews, waiting for a save). It is subtracted from the elapsed time.
    """

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}
        self._since: float | None = None

    def phase(self, name: str) -> _Phase:
        """Returns a context manager that adds the time of its body to the phase `name`."""
        if self._since is None:  # is not set in __init__, because building the model is not part of the first step
            self._since = perf_counter()
        phase = self._phases.get(name)
        if phase is None:
            phase = self._phases[name] = _Phase()
        return phase

    def add(self, name: str, seconds: float) -> None:
        """Adds time to the phase `name` that was measured elsewhere for one step."""
        phase = self.phase(name)
        phase.seconds += seconds
        phase.added += 1

    def interval(self, samples: int) -> dict[str, float]:
        """Returns samples_per_s, step_ms and data_wait_ms since the last call, over `samples` trained samples.

        Times are means per step. Every other phase except "aside" is returned as `<name>_ms`. Returns an empty dict if
        no step has ended since the last call.
        """
        now = perf_counter()
        seconds = {name: phase.seconds for name, phase in self._phases.items()}
        steps = self._phases["step"].count if "step" in self._phases else 0
        if not steps or self._since is None:
            return {}
        elapsed = max(now - self._since - seconds.pop("aside", 0.0), 1e-9)
        # Times that were measured elsewhere arrive one step late, so there may be fewer of them than steps.
        times = {name: phase.added or steps for name, phase in self._phases.items()}
        for phase in self._phases.values():
            phase.seconds, phase.count, phase.added = 0.0, 0, 0
        self._since = now
        del seconds["step"]
        per_step = {f"{name}_ms": spent / times[name] * 1e3 for name, spent in seconds.items() if name != "data"}
        return {
            "samples_per_s": samples / elapsed,
            "step_ms": elapsed / steps * 1e3,
            "data_wait_ms": seconds.get("data", 0.0) / steps * 1e3,
            **per_step,
        }


def slowest(per_rank_ms: Sequence[float]) -> tuple[int, float]:
    """Returns the slowest rank, and its time as a multiple of the median of the other ranks."""
    rank = max(range(len(per_rank_ms)), key=per_rank_ms.__getitem__)
    others = [ms for other, ms in enumerate(per_rank_ms) if other != rank]
    median = statistics.median(others) if others else per_rank_ms[rank]
    if median == 0:
        return rank, 1.0 if per_rank_ms[rank] == 0 else float("inf")
    return rank, per_rank_ms[rank] / median


def gpu_memory_gib(device: torch.device) -> float | None:
    """Returns the peak memory of tensors on this GPU so far, in GiB; None on the CPU."""
    if device.type != "cuda":
        return None
    import torch

    return torch.cuda.max_memory_allocated(device) / 2**30


def device_memory_gib(device: torch.device) -> float:
    """Returns the memory of a GPU, in GiB."""
    import torch

    return torch.cuda.get_device_properties(device).total_memory / 2**30


def host_memory_gib() -> float:
    """Returns the peak resident set size of this process so far, in GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes on macOS, KiB on Linux
