"""Measures times on a GPU without waiting for it, and the time in which a rank waits for others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class DeviceTimer:
    """Measures elapsed time on the device without waiting for it; read the result later."""

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
        """Returns the elapsed time on the host or on the device, whichever is longer."""
        if self._events is None:
            return self._seconds
        return max(self._seconds, float(self._events[0].elapsed_time(self._events[1])) / 1e3)


class WaitTimer:
    """Adds up the time of a step in which this rank waits for communication or for other ranks; read it later.

    On a GPU a wait is the time between two events on the compute stream with no kernel between them. It is 0 while the
    GPU still has work from before the wait, that is, if communication overlaps with computation.
    """

    def __init__(self, device: torch.device, *, active: bool = True) -> None:
        """With `active=False`, for a run with a single rank, the timer measures nothing."""
        self._on_gpu, self._active = device.type == "cuda", active
        self._marks: list[Any] = []  # begin, end, begin, end, ...: times, or events on the GPU

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which this rank only waits."""
        self._mark()
        yield
        self._mark()

    def marked(self, total: Tensor) -> Tensor:
        """Returns the loss; its backward pass marks the end of its own computation. Call `end_backward` after it.

        DDP and FSDP wait for their last reductions in callbacks at the end of backward, which they queue later.
        """
        return _AtEndOfBackward.apply(total, self._mark)  # type: ignore[no-any-return, no-untyped-call]

    def end_backward(self) -> None:
        """Marks the end of backward, after all reductions."""
        self._mark()

    def seconds(self) -> float:
        """Returns the time spent waiting. On a GPU, all events must have happened."""
        pairs = list(zip(self._marks[::2], self._marks[1::2], strict=False))
        if self._on_gpu:
            return sum(float(begin.elapsed_time(end)) for begin, end in pairs) / 1e3
        return float(sum(end - begin for begin, end in pairs))

    def _mark(self) -> None:
        if not self._active:
            return
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)


class _AtEndOfBackward(torch.autograd.Function):
    """The identity; its backward pass queues a call for the end of the whole backward pass."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, call: Any) -> Tensor:
        ctx.call = call
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        torch.autograd.Variable._execution_engine.queue_callback(ctx.call)
        return gradients[0], None
