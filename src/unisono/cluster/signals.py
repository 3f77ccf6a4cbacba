"""How a rank learns that it should stop.

Signal handlers only set a flag; the training loop looks at it where all ranks decide together. Who sends which signal
depends on who started the process:

- under unisono's launcher the request comes as a file in the job's folder. SIGTERM there means that another rank died
  and this one is in the way of the restart: it keeps its default action and ends the process at once, even in the
  middle of a collective (a Python handler would run only after it, and cost the agent's grace of 30 s).
- under another launcher (torchrun, srun, mpirun) SIGTERM, SIGUSR1 and SIGINT are requests.
- in a single process too, and a second Ctrl-C stops it at once.
"""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

STOP_FILE = "stop"
"""Name of the file, in the job's folder, that asks the ranks to stop; it holds the name of the signal."""

SAME_PRESS_S = 0.25
"""Signals closer together than this are one request: wrappers such as `uv run` pass on what the terminal also sent."""

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))

_POLL_S = 0.2


class StopRequest:
    """Whether somebody asked the run to stop, for use in a `with` block around the training loop."""

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
        if self._job_folder is not None:
            threading.Thread(target=self._watch, args=(self._job_folder,), name="stop-file", daemon=True).start()
        if threading.current_thread() is threading.main_thread():  # python allows handlers only there
            for signum in STOP_SIGNALS:
                self._previous[signum] = signal.signal(signum, self._handler_for(signum))
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._closed.set()
        for signum, handler in self._previous.items():
            # None: it was installed from C and cannot be put back from python
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handler_for(self, signum: int) -> Any:
        if self._launcher == "unisono":
            if signum == signal.SIGTERM:
                return signal.SIG_DFL
            if signum == signal.SIGINT:
                return signal.SIG_IGN  # the launcher got it too and decides
        return self._on_signal

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._requested = self._requested or signal.Signals(signum).name
        if self._launcher == "plain" and signum == signal.SIGINT:
            if self._interrupted_at is None:
                self._interrupted_at = time.monotonic()
            elif time.monotonic() - self._interrupted_at > SAME_PRESS_S:
                raise KeyboardInterrupt

    def _watch(self, job_folder: Path) -> None:
        path = job_folder / STOP_FILE
        while not self._closed.wait(_POLL_S):
            if path.exists():
                self._requested = self._requested or path.read_text().strip() or "stop"
                return
