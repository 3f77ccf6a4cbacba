"""Locks that determine which process decides about a study, and which process trains each trial.

If a study is not shared, one process holds the lock of the whole study. In a shared study, a process holds this lock
only while it decides about a trial, and holds a separate lock for each trial that it trains. If a process dies, the
kernel releases its locks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unisono.errors import UserError
from unisono.observe.lock import FolderLock

CLAIMS = "claims"
"""The folder with the locks of trials. It is empty while no process works on the study."""

_WAIT_S = 300.0  # other processes hold the lock only briefly, but a network file system may be slow


class StudyLock:
    """The locks of one process for one study."""

    def __init__(self, folder: Path, *, shared: bool) -> None:
        self.shared = shared
        self._folder = folder
        self._claims: dict[int, FolderLock] = {}

    @contextmanager
    def whole_study(self) -> Iterator[None]:
        """Holds the lock of a study that is not shared; at the end, also releases all claims of this process."""
        lock = FolderLock(self._folder)
        if not self.shared:
            lock.take()
        try:
            yield
        finally:
            for number in list(self._claims):
                self.release(number)
            lock.release()

    @contextmanager
    def decision(self) -> Iterator[None]:
        """Holds the lock of a shared study while this process decides about a trial."""
        if not self.shared:
            yield
            return
        lock = FolderLock(self._folder)
        lock.take(_WAIT_S)
        try:
            yield
        finally:
            lock.release()

    def claim(self, number: int) -> bool:
        """Claims a trial; returns False if another process trains it, or if this process has already begun it."""
        if number in self._claims:
            return False
        lock = FolderLock(self._folder / CLAIMS / f"{number:04d}")
        if self.shared:
            try:
                lock.take(wait_s=0.0)
            except UserError:
                return False
        self._claims[number] = lock
        return True

    def release(self, number: int) -> None:
        """Releases the claim of a finished trial."""
        self._claims.pop(number).release()
        for folder in (self._folder / CLAIMS / f"{number:04d}", self._folder / CLAIMS):
            with suppress(OSError):  # the folder does not exist, or it contains locks of other processes
                folder.rmdir()
