"""Measures time on a GPU without waiting for it."""

from __future__ import annotations

import time

import torch


class DeviceTimer:
    """Measures a time on the device without waiting for it; read it later."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._began, self._seconds = time.perf_counter(), 0.0
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._events[0].record()

    def end(self) -> None:
        """Stops the measurement."""
        self._seconds = time.perf_counter() - self._began
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """The elapsed time on the host or on the device, whichever is longer."""
        if self._events is None:
            return self._seconds
        return max(self._seconds, float(self._events[0].elapsed_time(self._events[1])) / 1e3)
