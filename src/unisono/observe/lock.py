"""Prevents a second run from using a run folder, from before the first read to the last write.

The locks are made with flock, so the kernel releases them when their process ends. The launcher acquires them
exclusively and then shares them with rank 0. The folder stays locked while either of them is alive: between two
attempts only the launcher is alive, and after the launcher was killed a rank may still run for a moment.

Both the folder and the file `.lock` in it are locked, because NFS locks folders only within one machine. A folder that
does not exist yet is created for the lock, and removed again if it is still empty at the end.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from unisono.cluster.signals import before_exit
from unisono.errors import UserError
from unisono.observe.status_line import print_line

LOCK = ".lock"
"""The locked file in a run folder; it exists only while a run is active, or after a kill."""

_WAIT_S = 5.0  # seconds to wait for the lock, because the previous attempt may still be exiting
_OTHER_MACHINE_WAIT_S = 120.0  # seconds to wait for another machine; NFS releases a crashed machine's locks after 90 s
_RETRY_S = 0.05
_FILE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class FolderLock:
    """The lock of a run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handles: list[int] = []
        self._owner = os.getpid()
        self._created: list[Path] = []  # folders that this lock has created, outermost first
        self._shares = False
        self._held_elsewhere = False  # whether another machine holds the lock: the file is locked, but not the folder

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return bool(self._handles)

    @classmethod
    def of_new_folder(cls, path: Path) -> FolderLock:
        """Creates and locks a folder with this name, or with a number appended if the name exists."""
        for number in count(1):
            lock = cls(path if number == 1 else path.with_name(f"{path.name}-{number}"))
            if not os.path.lexists(lock.path) and lock._take(fcntl.LOCK_EX, 0.0):
                return lock
        raise AssertionError  # count() has no end

    def take(self, wait_s: float = _WAIT_S) -> None:
        """Locks the folder, creating it if needed; raises UserError if another run holds the lock."""
        if not self.is_held and not self._take(fcntl.LOCK_EX, wait_s):
            raise UserError(f"another run is writing to {self.path}; wait for it, or choose another output_dir")

    def share(self, wait_s: float = _WAIT_S) -> None:
        """Acquires the lock that the launcher of this run already holds, so that both hold it."""
        self._shares = True
        if not self.is_held and not self._take(fcntl.LOCK_SH, wait_s):
            raise UserError(f"another run has locked {self.path}; choose another output_dir")

    def release(self) -> None:
        """Releases the lock. Removes the lock file, and those folders created for the lock that are still empty."""
        with suppress(ValueError):
            before_exit.remove(self.release)
        is_owner = os.getpid() == self._owner  # a forked process inherits the lock and must not release it
        if self.is_held and is_owner and not self._shares:
            # Remove these before releasing the lock, so that no other run can be using the folder.
            with suppress(OSError):
                if (self.path / LOCK).lstat().st_size == 0:
                    (self.path / LOCK).unlink()
            for folder in reversed(self._created):
                with suppress(OSError):  # the folder is not empty
                    folder.rmdir()
        for handle in self._handles:
            if is_owner:
                with suppress(OSError):  # closing is not enough if a forked process, such as a recipe's pool, is alive
                    fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)
        self._handles, self._created = [], []

    def _take(self, kind: int, wait_s: float) -> bool:
        started, has_warned = time.monotonic(), False
        before_exit.append(self.release)
        while not self._try(kind):
            waited_s = time.monotonic() - started
            if waited_s > (_OTHER_MACHINE_WAIT_S if self._held_elsewhere and wait_s else wait_s):
                self.release()
                return False
            if waited_s > _WAIT_S and not has_warned:
                has_warned = True
                print_line(f"{self.path} is locked by another machine; waiting up to {_OTHER_MACHINE_WAIT_S:.0f} s")
            time.sleep(_RETRY_S)
        return True

    def _try(self, kind: int) -> bool:
        """Tries once to acquire the lock; returns False if another process holds it or has just removed the folder."""
        try:
            for folder in reversed([self.path, *self.path.parents]):
                if not folder.is_dir():
                    folder.mkdir()
                    self._created.append(folder)
            taken = [_locked(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), kind)]
        except (FileExistsError, FileNotFoundError):
            return False
        except OSError as error:
            reason = f"({error.strerror}); choose another --output_dir"
            raise UserError(f"output_dir {self.path} cannot be created or locked {reason}") from None
        with suppress(OSError):  # on a full disk, or if .lock is a folder, locks only the run folder
            taken.append(_locked(os.open(self.path / LOCK, _FILE_FLAGS, 0o666), kind) if taken[0] is not None else None)
        self._held_elsewhere = taken[0] is not None and None in taken
        self._handles = [handle for handle in taken if handle is not None]
        targets = (self.path, self.path / LOCK)
        if None not in taken and all(map(_is_same_file, targets, self._handles)):
            return True
        for handle in self._handles:
            os.close(handle)
        self._handles = []
        return False


def _locked(handle: int, kind: int) -> int | None:
    """Acquires a lock of `kind` and converts it to a shared lock; returns None if another process holds it."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
        # The conversion is not atomic. If another process acquires the lock in between, this one tries again.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:  # the file system does not support locks
        pass
    return handle


def is_held(folder: Path) -> bool:
    """Whether a run holds the lock of this folder."""
    for target, flags in ((folder, os.O_RDONLY | os.O_DIRECTORY), (folder / LOCK, _FILE_FLAGS & ~os.O_CREAT)):
        try:
            handle = os.open(target, flags | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # the file system does not support locks
            pass
        finally:
            os.close(handle)
    return False


def _is_same_file(target: Path, handle: int) -> bool:
    """Whether the handle still refers to the target, which may have been removed before it was locked."""
    try:
        return os.path.samestat(os.stat(target), os.fstat(handle))
    except FileNotFoundError:
        return False
