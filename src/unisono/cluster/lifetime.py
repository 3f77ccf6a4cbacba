"""Ensures that no process of a run outlives its parent, even after kill -9.

A process asks the kernel to kill it when its parent dies. A rank does so before it imports torch, because the import
takes seconds and its launcher may die meanwhile. A loader worker does so as soon as it starts. This works only on
Linux; on other systems, the functions here do nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

LAUNCHER_PID = "UNISONO_LAUNCHER_PID"
"""Environment variable: the process id of the launcher, for its ranks."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ends this process when the process that started it ends, however that happens.

    Call it in ranks and workers that unisono started, never in a process that the user started, because the user may
    want it to outlive the shell. The kernel watches the *thread* that forked the process, not the parent process. So a
    process that calls this function must be started from a thread that lives as long as the process is needed.
    """
    if sys.platform != "linux":
        return
    before = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return  # some sandboxes forbid this call; the launcher still kills its ranks when it can
    # The kernel sends no signal for a parent that died before the call above.
    parent = _expected_parent()
    now = os.getppid()
    if now != before or (parent is not None and now != parent and _is_gone(parent)):
        os._exit(128 + signal.SIGKILL)


def flush_streams() -> None:
    """Flushes stdout and stderr if they are open."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # AttributeError: closed before Python started
            stream.flush()


def end_process(status: int) -> NoReturn:
    """Ends this process with `status`, even if a thread would keep it alive or crash it on exit.

    Python waits forever for a thread that is not a daemon; a thread that is still in C++ code (an interrupted save)
    makes the interpreter abort.
    """
    flush_streams()
    if threading.active_count() == 1 and "torch" not in sys.modules:  # Python does not count torch's threads
        sys.exit(status)
    atexit._run_exitfuncs()
    os._exit(status)


def start_loader_worker(worker_id: int) -> None:
    """Makes a loader worker die with its rank and ignore stop signals; pass it to `DataLoader(worker_init_fn=...)`."""
    die_with_parent()
    # Ctrl-C reaches the whole foreground process group. If it killed a worker, the rank could not finish its step and
    # save.
    for name in ("SIGINT", "SIGUSR1", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _expected_parent() -> int | None:
    process = multiprocessing.parent_process()
    if process is not None:
        return process.pid
    launcher = os.environ.get(LAUNCHER_PID, "")
    return int(launcher) if launcher.isdecimal() else None


def _is_gone(pid: int) -> bool:
    # With the forkserver start method the parent is not the process that requested this one. So only a process that
    # no longer exists (or a zombie, whose children already have another parent) counts as dead.
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in ("Z", "X")
