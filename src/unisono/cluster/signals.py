"""How a rank learns that it should stop.

Signal handlers only set a flag; the training loop looks at it where all ranks decide together. SIGTERM, SIGUSR1, SIGINT
and SIGHUP (unless it is ignored, as under nohup) sent to any one rank are requests, whoever started it. Besides,

- under unisono's launcher the request also comes as a file in the job's folder: the ranks sit in sessions of their own,
  so that Ctrl-C and a scheduler's signal may reach the launcher only. It never sends SIGTERM itself: ranks that are in
  the way of a restart are killed.
- in a single process a second Ctrl-C stops it at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from unisono.errors import EXIT_STOPPED

STOP_FILE = "stop"
"""Name of the file, in the job's folder, that asks the ranks to stop; it holds the name of the signal."""

SAME_PRESS_S = 0.25
"""Signals closer together than this are one request: wrappers such as `uv run` pass on what the terminal also sent."""

_POLL_S = 0.2
_early: list[str] = []  # what `note_signals_early` has noted


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a run to stop; SIGHUP is not one of them where it is ignored: that is what nohup does."""
    names = [name for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)]
    found = [signal.Signals[name] for name in names]
    return [each for each in found if each.name != "SIGHUP" or signal.getsignal(each) is not signal.SIG_IGN]


def note_signals_early() -> None:
    """From now on stop signals are noted for the `StopRequest` to come, because importing torch takes seconds."""
    for signum in stop_signals():
        signal.signal(signum, lambda number, frame: _early.append(signal.Signals(number).name))


def stop_before_start() -> None:
    """Until ranks are started or training begins, a stop signal ends this process at once: there is nothing to save."""

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, f"unisono: {signal.Signals(number).name}: stopped before anything was started\n".encode())
        os._exit(EXIT_STOPPED)

    if threading.current_thread() is threading.main_thread():
        for signum in stop_signals():
            if signum != signal.SIGINT:  # python's own KeyboardInterrupt
                signal.signal(signum, end)


class StopRequest:
    """Whether somebody asked the run to stop, for use in `with` blocks around the training loop."""

    def __init__(self, launcher: str, job_folder: Path | None = None) -> None:
        """`launcher` is `World.launcher`; `job_folder` is given under unisono's own launcher only."""
        if (launcher == "unisono") != (job_folder is not None):
            raise ValueError("job_folder goes with launcher 'unisono'")
        self._launcher = launcher
        self._job_folder = job_folder
        self._requested: str | None = None
        self._interrupted_at: float | None = None
        self._previous: dict[int, Any] = {}
        self._closed = threading.Event()

    @property
    def requested(self) -> str | None:
        """The name of the signal that asked to stop, None while nobody did."""
        return self._requested

    def __enter__(self) -> StopRequest:
        self._closed = threading.Event()
        if self._job_folder is not None:
            watch = threading.Thread(target=self._watch, args=(self._job_folder, self._closed), daemon=True)
            watch.name = "stop-file"
            watch.start()
        if threading.current_thread() is threading.main_thread():  # python allows handlers only there
            for signum in stop_signals():
                self._previous[signum] = signal.signal(signum, self._on_signal)
        self._requested = self._requested or next(iter(_early), None)
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._closed.set()
        for signum, handler in self._previous.items():
            # None: it was installed from C and cannot be put back from python
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._requested = self._requested or signal.Signals(signum).name
        if self._launcher == "plain" and signum == signal.SIGINT:
            if self._interrupted_at is None:
                self._interrupted_at = time.monotonic()
            elif time.monotonic() - self._interrupted_at > SAME_PRESS_S:
                raise KeyboardInterrupt

    def _watch(self, job_folder: Path, closed: threading.Event) -> None:
        path = job_folder / STOP_FILE
        while not closed.wait(_POLL_S):
            if path.exists():
                self._requested = self._requested or path.read_text().strip() or "stop"
                return
