"""File locks between processes. The kernel releases a lock when its process ends, even if the process is killed."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_RETRY_S = 0.02
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file, which is created if necessary; waits for the process that holds it."""
    handle = os.open(path, _FLAGS, 0o666)
    try:
        while not _acquired(handle):
            time.sleep(_RETRY_S)  # a signal could not interrupt a blocking call
        yield
    finally:
        # Unlock explicitly: a process forked meanwhile has the file open too and would keep the lock until it exits.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _acquired(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks, so each process does the work itself
        pass
    return True
