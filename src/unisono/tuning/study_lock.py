"""Which process may decide about a study, and which one trains which trial.

A study that one process works on is locked as a whole. In a shared one, a process takes that lock only while it decides
about a trial, and holds a lock of its own for each trial that it trains. All of these are locks of the kernel: those of
a process that dies are released.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unisono.errors import UserError
from unisono.observe.lock import FolderLock

CLAIMS = "claims"
"""The folder with the locks of trials; it is empty unless processes work on the study."""

_WAIT_S = 300.0  # other processes hold the lock for moments, but a network file system may be slow


class StudyLock:
    """The locks of one process for one study."""

    def __init__(self, folder: Path, *, shared: bool) -> None:
        self.shared = shared
        self._folder = folder
        self._claims: dict[int, FolderLock] = {}

    @contextmanager
    def whole_study(self) -> Iterator[None]:
        """Holds the lock of a study that is not shared; at its end, this process trains no trial any more."""
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
        """Excludes other processes for a moment."""
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
        """Whether this process may train the trial: no other process does, nor has this one begun it already."""
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
        """Ends the claim of a trial, which has finished."""
        self._claims.pop(number).release()
        for folder in (self._folder / CLAIMS / f"{number:04d}", self._folder / CLAIMS):
            with suppress(OSError):  # it does not exist, or it contains the locks of others
                folder.rmdir()
