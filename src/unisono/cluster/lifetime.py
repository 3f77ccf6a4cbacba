"""No process of ours outlives the one that started it, even when that is killed with -9.

The kernel is asked to kill this process when its parent dies. A rank asks before it imports torch (which takes
seconds in which it could be orphaned), a loader worker as soon as it starts. Linux only; elsewhere nothing happens.
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
"""Variable in which the launcher tells its ranks its own process id."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ends this process when the process that started it ends, however that happens.

    Call it from ranks and workers that unisono started, never from a process the user started: that one may well be
    meant to outlive its shell. Trap: the kernel watches the *thread* that forked, so whoever starts processes that
    call this must do so from a thread that lives as long as they are needed.
    """
    if sys.platform != "linux":
        return
    before = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return  # some sandboxes forbid it; the launcher still ends its ranks when it can
    # A parent that died before the call above sends nothing any more.
    parent = _expected_parent()
    now = os.getppid()
    if now != before or (parent is not None and now != parent and _is_gone(parent)):
        os._exit(128 + signal.SIGKILL)


def flush_streams() -> None:
    """Brings out what was printed, where there is still somewhere to print to."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # AttributeError: closed before python began
            stream.flush()


def end_process(status: int) -> NoReturn:
    """Ends this process with `status`, also when a thread of somebody's would keep it, or its end would crash.

    A thread that is not a daemon keeps python from ending for ever; one that is still in C++ code (a save that was
    interrupted) makes it abort.
    """
    flush_streams()
    if threading.active_count() == 1 and "torch" not in sys.modules:  # whose threads python does not count
        sys.exit(status)
    atexit._run_exitfuncs()
    os._exit(status)


def start_loader_worker(worker_id: int) -> None:
    """For `DataLoader(worker_init_fn=...)`: the worker dies with its rank and leaves stopping to it."""
    die_with_parent()
    # Ctrl-C reaches the whole foreground group; a worker that dies of it would take the last checkpoint with it.
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
    # With the forkserver start method the parent is another process than the one that asked for us: only a process
    # that is really gone (or a zombie, whose children already have another parent) counts as dead.
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in ("Z", "X")
