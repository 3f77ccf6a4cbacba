"""One profile with torch.profiler on one rank: starts it, marks steps and phases in the trace, stops it, writes it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from unisono.observe.profile.allocator import AllocatorHistory
from unisono.observe.profile.files import compress, memory_name, trace_name, write_json
from unisono.observe.profile.memory import memory_over_time
from unisono.observe.profile.pictures import memory_picture, memory_title
from unisono.observe.profile.trace import MARK, Trace, read_trace

log = logging.getLogger(__name__)


class ProfileSession:
    """Profiles everything that this process and its GPU do between `start` and `stop`."""

    def __init__(self, device: torch.device, *, memory: bool) -> None:
        self._device, self._memory = device, memory
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profiler = profile(activities=activities, profile_memory=memory)
        self._history = AllocatorHistory(device) if memory and device.type == "cuda" else None
        self._phase: Any = None
        self._in_step = self._running = False

    def start(self) -> None:
        """Starts the profiler; raises RuntimeError if another one runs in this process."""
        if torch.autograd.profiler._is_profiler_enabled:  # starting a second one would end the first
            raise RuntimeError("another torch profiler runs in this process")
        self._synchronize()
        self._profiler.prepare_trace()
        self._profiler.start_trace()
        self._running = True
        if self._history is not None:
            self._history.start()

    def stop(self) -> None:
        """Stops the profiler, after the GPU has finished the kernels of the last step."""
        if not self._running:
            return
        self._running = False
        with suppress(RuntimeError):  # a failed kernel is reported by the step, not here
            self._synchronize()
        if self._history is not None:
            self._history.stop()
        self._profiler.stop_trace()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A context for a step, which the trace shows as a range."""
        with record_function(f"{MARK}step {number}"):
            self._in_step = True
            try:
                yield
            finally:
                self._end_phase()
                self._in_step = False

    def phase(self, name: str) -> None:
        """Begins a phase of the current step, and ends the previous one."""
        if self._in_step:
            self._end_phase()
            self._phase = record_function(f"{MARK}{name}")
            self._phase.__enter__()

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def write(self, folder: Path, rank: int) -> tuple[Trace, dict[str, Any] | None]:
        """Writes the trace and the memory of this rank; returns the trace, and the memory over time if any."""
        plain = folder / f".{trace_name(rank)}.part"
        try:
            self._profiler.export_chrome_trace(str(plain))
            content = json.loads(plain.read_bytes())
            compress(plain, folder / trace_name(rank))
        finally:
            plain.unlink(missing_ok=True)
        trace = read_trace(content, self._device.type)
        if not self._memory:
            return trace, None
        memory = memory_over_time(trace, on_device=self._device.type == "cuda")
        if memory:
            write_json(folder / memory_name(rank), memory)
            drawn = memory_picture(memory, memory_title(rank, str(self._device)))
            (folder / memory_name(rank)).with_suffix(".svg").write_text(drawn, encoding="utf-8")
        if self._history is not None and self._history.content is not None:
            write_json(folder / f"allocator_rank_{rank}.json.gz", self._history.content)
        return trace, memory or None
