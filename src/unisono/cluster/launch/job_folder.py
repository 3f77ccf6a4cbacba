"""The temporary folder through which a launcher and its ranks exchange files.

A rank writes its heartbeat (`heartbeat_rank0`), its stacks on request (`stack_rank0.txt`) and how it ended
(`outcome_rank0.json`). The launcher writes the stop file (`stop`) and renames the outcomes of earlier attempts.

A launcher locks its folder with flock before it writes a marker file into the folder. The kernel releases the lock when
the launcher ends, so a folder with the marker but without a lock belongs to a launcher that is gone. A folder without
the marker is never removed, because it may belong to a user, or to a launcher that is just starting.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from unisono.cluster.hangs.heartbeat import last_beats
from unisono.cluster.outcome import Outcome, death, read_all

_PREFIX, _MARKER = "unisono-", ".unisono-launcher"


@contextlib.contextmanager
def job_folder() -> Iterator[Path]:
    """Creates this launcher's job folder and removes it at the end; also removes job folders of killed launchers."""
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # If the file system has no locks, no marker is written, because other launchers would then remove the folder.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / _MARKER).touch()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def collect_outcomes(folder: Path, statuses: Mapping[int, int]) -> list[Outcome]:
    """Returns the outcomes that ranks have written, and derives outcomes for ranks that exited without writing one.

    `statuses` are the exit statuses of the ranks that have exited; a rank that is still exiting may have written its
    outcome too. The step of a derived outcome and its time come from the rank's last heartbeat. That time is earlier
    than the failures that the death causes on other ranks.
    """
    by_rank = {outcome.rank: outcome for outcome in read_all(folder)}
    beats = {beat.rank: beat for beat in last_beats(folder, {*statuses, *by_rank})}
    for rank, status in statuses.items():
        if rank not in by_rank:
            by_rank[rank] = death(rank, status, beats[rank].time or time.time())
    return [
        replace(outcome, step=outcome.step or beats[rank].step or None) for rank, outcome in sorted(by_rank.items())
    ]


def remove_abandoned(parent: Path | None = None) -> None:
    """Removes this user's job folders whose launcher no longer runs; never raises."""
    parent = parent or Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):
        for folder in parent.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Check for the marker only under the lock. A launcher that wrote a marker holds the lock until it exits.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_uid == os.geteuid() and (folder / _MARKER).is_file():
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
