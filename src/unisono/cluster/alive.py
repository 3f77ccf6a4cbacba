"""Shows a scheduler that the launcher is alive, by the age of a file.

Kubernetes restarts a container whose liveness probe fails. The probe must not fail while ranks compile, save or wait
for other machines, however long that takes: the launcher itself finds ranks that hang (`hangs/`). What only the
scheduler can find is a launcher that hangs, for instance in a file system that no longer responds. So the launcher
touches the file named by UNISONO_ALIVE_FILE from the loops in which it waits, not from a thread of its own, which would
go on while the launcher hangs. `python -m unisono.cluster.alive 60` fails if the file is older than 60 seconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ALIVE_FILE = "UNISONO_ALIVE_FILE"
"""Environment variable: the file whose time of modification shows that the launcher is alive."""

_INTERVAL_S = 1.0
_next_beat = 0.0


def beat() -> None:
    """Touches the file, at most once per second; does nothing if the variable is not set."""
    global _next_beat
    path = os.environ.get(ALIVE_FILE)
    if path is None or time.monotonic() < _next_beat:
        return
    _next_beat = time.monotonic() + _INTERVAL_S
    with suppress(OSError):  # training continues if the file cannot be written
        Path(path).touch()


def is_alive(path: str, seconds: float) -> bool:
    """Whether the launcher has touched the file within this many seconds."""
    try:
        return time.time() - os.stat(path).st_mtime <= seconds
    except OSError:
        return False


def main(argv: Sequence[str]) -> int:
    """Parses SECONDS; returns 0 if the launcher is alive, otherwise 1."""
    path, seconds = os.environ.get(ALIVE_FILE, ""), float(argv[0])
    if is_alive(path, seconds):
        return 0
    print(f"the launcher has not touched {path or ALIVE_FILE} for more than {seconds:g} s", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
