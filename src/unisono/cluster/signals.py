"""Receives requests to stop, in each rank.

Signal handlers only set a flag. The training loop reads the flag at the point of a step where all ranks agree, so a
request to one rank stops all ranks at the same step, with a checkpoint. SIGINT, SIGTERM, SIGUSR1 and SIGHUP (unless it
is ignored, as under nohup) are requests, regardless of the sender and of the launcher. In addition:

- Under unisono's launcher the request also arrives as the file `stop` in the job folder, which a thread of each rank
  polls. Each rank leads its own session, so Ctrl-C and a scheduler's signal may reach only the launcher. The launcher
  never sends SIGTERM; before a restart, it kills the remaining ranks with SIGKILL.
- A single process stops at once on a second Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from unisono.errors import EXIT_STOPPED

STOP_FILE = "stop"
"""Name of the file in the job folder that asks the ranks to stop; it contains the name of the signal."""

SAME_PRESS_S = 0.25
"""Signals at most this many seconds apart count as one: wrappers such as `uv run` repeat the terminal's signal."""

_POLL_S = 0.2
before_exit: list[Callable[[], None]] = []
"""Functions that `stop_before_start` calls before it ends the process."""

_early: list[str] = []  # names of the signals that `note_signals_early` has received


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that ask a run to stop; without SIGHUP if it is ignored, as under nohup."""
    names = [name for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)]
    signals = [signal.Signals[name] for name in names]
    return [each for each in signals if each.name != "SIGHUP" or signal.getsignal(each) is not signal.SIG_IGN]


def note_signals_early() -> None:
    """Records stop signals for a later `StopRequest`; call it before importing torch, which takes seconds."""
    for signum in stop_signals():
        signal.signal(signum, lambda number, frame: _early.append(signal.Signals(number).name))


def stop_before_start() -> None:
    """Makes a stop signal end this process at once, as long as no ranks run and there is nothing to save."""

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, f"unisono: {signal.Signals(number).name}: stopped before any rank was started\n".encode())
        for undo in list(before_exit):
            undo()
        os._exit(EXIT_STOPPED)

    if threading.current_thread() is threading.main_thread():
        for signum in stop_signals():
            if signum != signal.SIGINT:  # SIGINT keeps raising KeyboardInterrupt
                signal.signal(signum, end)


@contextlib.contextmanager
def handling_stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Installs `handler` for the stop signals, and restores the previous handlers at the end."""
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # Python allows signal handlers only in the main thread
        previous = {signum: signal.signal(signum, handler) for signum in stop_signals()}
    try:
        yield
    finally:
        for signum, old in previous.items():
            # None: the handler was installed from C, and Python cannot restore it
            signal.signal(signum, signal.SIG_DFL if old is None else old)


class StopRequest:
    """Receives requests to stop, for use in a `with` block around the training loop."""

    def __init__(self, launcher: str, job_folder: Path | None = None) -> None:
        """`launcher` is `World.launcher`; pass `job_folder` under unisono's own launcher only."""
        if (launcher == "unisono") != (job_folder is not None):
            raise ValueError("job_folder requires launcher 'unisono'")
        self._launcher = launcher
        self._job_folder = job_folder
        self._requested: str | None = None
        self._interrupted_at: float | None = None
        self._handlers = contextlib.ExitStack()
        self._closed = threading.Event()

    @property
    def requested(self) -> str | None:
        """The name of the signal that asked to stop, or None."""
        return self._requested

    def __enter__(self) -> StopRequest:
        self._closed = threading.Event()
        if self._job_folder is not None:
            watch = threading.Thread(target=self._watch, args=(self._job_folder, self._closed), daemon=True)
            watch.name = "stop-file"
            watch.start()
        self._handlers.enter_context(handling_stop_signals(self._on_signal))
        self._requested = self._requested or next(iter(_early), None)
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._closed.set()
        self._handlers.close()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._requested = self._requested or signal.Signals(signum).name
        if self._launcher == "plain" and signum == signal.SIGINT:
            if self._interrupted_at is None:
                self._interrupted_at = time.monotonic()
            elif time.monotonic() - self._interrupted_at > SAME_PRESS_S:
                raise KeyboardInterrupt

    def request(self, signum: int) -> None:
        """Records a signal that arrived while these handlers were not installed."""
        self._requested = self._requested or signal.Signals(signum).name

    def _watch(self, job_folder: Path, closed: threading.Event) -> None:
        path = job_folder / STOP_FILE
        while not closed.wait(_POLL_S):
            if path.exists():
                self._requested = self._requested or path.read_text().strip() or "stop"
                return


class BetweenCalls:
    """Handles stop signals while the user's own code runs, between two calls of the trainer.

    Enter it before a `StopRequest`, which takes over during each call and restores these handlers afterwards. It
    handles only signals that would end the process: Ctrl-C still raises KeyboardInterrupt, and the user's own handlers
    stay installed. The next call reads the request, unless `on_signal` acts on it at once. A second signal ends the
    process.
    """

    def __init__(self, stop: StopRequest, on_signal: Callable[[], bool]) -> None:
        """`on_signal` returns False if no further call will read the request."""
        self._stop, self._on = stop, on_signal
        self._handled: list[signal.Signals] = []

    def __enter__(self) -> BetweenCalls:
        if threading.current_thread() is threading.main_thread():
            self._handled = [each for each in stop_signals() if signal.getsignal(each) is signal.SIG_DFL]
            for signum in self._handled:
                signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        if threading.current_thread() is threading.main_thread():
            for signum in self._handled:
                if signal.getsignal(signum) == self._on_signal:
                    signal.signal(signum, signal.SIG_DFL)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        again = self._stop.requested is not None
        self._stop.request(signum)
        if again or not self._on():
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
