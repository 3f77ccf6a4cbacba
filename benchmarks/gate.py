"""Lets variants of a benchmark take turns and times them, with the same code for every variant.

A variant calls `step_starts` at the start of every forward pass. At the end of a round the call reports the time and
blocks on a pipe while the others run. The loop around the call is unchanged, so unisono's own loop can take turns too.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time

import torch


@dataclass(frozen=True)
class Rounds:
    """The rounds of a benchmark. Of each round's `steps` steps, the first `dropped` are not timed; nor is round one."""

    rounds: int
    steps: int
    dropped: int

    @property
    def total_steps(self) -> int:
        """The steps of all rounds plus one, whose start is the end of the last round."""
        return (1 + self.rounds) * self.steps + 1


class Gate:
    """The end of the pipe at which a variant waits for its turn."""

    def __init__(self, pipe: Connection, rounds: Rounds, device: torch.device) -> None:
        self._pipe, self._rounds, self._device = pipe, rounds, device
        self._step, self._memory_before = 0, 0
        self._since = self._now()

    def model_starts(self) -> None:
        """Call before the model is built; memory is measured from here on."""
        if self._device.type == "cpu":
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak caused by imports
            self._memory_before = _status_kib("VmRSS")

    def step_starts(self) -> None:
        """Call once at the start of every forward pass."""
        place = self._step % self._rounds.steps
        if place == 0:
            self._end_round()
        if place == self._rounds.dropped:
            self._since = self._now()
        self._step += 1

    def _end_round(self) -> None:
        timed = self._rounds.steps - self._rounds.dropped
        wall_ms, busy_ms = ((now - then) * 1e3 / timed for now, then in zip(self._now(), self._since, strict=True))
        report = {"step_ms": wall_ms, "busy_ms": busy_ms, "peak_mib": self._peak_mib()}
        self._pipe.send_bytes(json.dumps(report).encode())
        try:
            self._pipe.recv_bytes()
        except EOFError:
            sys.exit("the benchmark that started this process has ended")

    def _now(self) -> tuple[float, float]:
        """Wall-clock time, and the CPU time of this process, which other processes disturb far less."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter(), process_time()

    def _peak_mib(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        return (_status_kib("VmHWM") - self._memory_before) / 2**10


def _status_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
