"""Keeps a second run out of a run folder, from the first look at it to the last write.

The locks are the kernel's (flock): they end with the process that holds them, however that ends. Whoever starts a run
needs them exclusively, and then shares them with the run's main rank, so that the folder is held for as long as one of
them lives: between two attempts only the launcher is there, and a launcher that was killed may leave a rank behind for
a moment.

Two things are locked: the folder itself, and the file `.lock` in it, because NFS locks folders only within one machine.
A folder that does not exist yet is made for the lock, and removed again if it is still empty at the end.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from unisono.cluster.signals import before_exit
from unisono.errors import UserError
from unisono.observe.status_line import print_line

LOCK = ".lock"
"""The file in a run folder that is locked with it; there only while a run writes, or was killed."""

_PATIENCE_S = 5.0  # the attempt before this one may just be dying
_OTHER_MACHINE_S = 120.0  # NFS gives up the locks of a machine that crashed after 90 s
_AGAIN_S = 0.05
_FILE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class FolderLock:
    """The right to write to a run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handles: list[int] = []
        self._owner = os.getpid()
        self._made: list[Path] = []  # folders that did not exist, outermost first
        self._shares = False
        self._held_elsewhere = False  # the folder is free on this machine, the file in it is not

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return bool(self._handles)

    @classmethod
    def of_new_folder(cls, path: Path) -> FolderLock:
        """Makes and locks a folder of this name, with a number after it if the name is taken."""
        for number in count(1):
            lock = cls(path if number == 1 else path.with_name(f"{path.name}-{number}"))
            if not os.path.lexists(lock.path) and lock._take(fcntl.LOCK_EX, 0.0):
                return lock
        raise AssertionError  # count() has no end

    def take(self, patience_s: float = _PATIENCE_S) -> None:
        """Locks the folder, which is made if it does not exist; UserError while another run holds it."""
        if not self.is_held and not self._take(fcntl.LOCK_EX, patience_s):
            raise UserError(f"another run is writing to {self.path}; wait for it, or choose another output_dir")

    def share(self, patience_s: float = _PATIENCE_S) -> None:
        """Holds the folder together with the launcher of this run, which has locked it."""
        self._shares = True
        if not self.is_held and not self._take(fcntl.LOCK_SH, patience_s):
            raise UserError(f"another run has taken {self.path}; choose another output_dir")

    def release(self) -> None:
        """Lets other runs in; what was made for the lock and holds nothing else is removed."""
        with suppress(ValueError):
            before_exit.remove(self.release)
        is_owner = os.getpid() == self._owner  # a forked process has the lock too, and must leave it to this one
        if self.is_held and is_owner and not self._shares:  # while it is held: nobody else can have taken it over
            with suppress(OSError):
                if (self.path / LOCK).lstat().st_size == 0:
                    (self.path / LOCK).unlink()
            for folder in reversed(self._made):
                with suppress(OSError):  # it is not empty
                    folder.rmdir()
        for handle in self._handles:
            if is_owner:
                with suppress(OSError):  # closing is not enough while a forked process (a recipe's pool) still lives
                    fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)
        self._handles, self._made = [], []

    def _take(self, kind: int, patience_s: float) -> bool:
        began, has_warned = time.monotonic(), False
        before_exit.append(self.release)
        while not self._try(kind):
            waited_s = time.monotonic() - began
            if waited_s > (_OTHER_MACHINE_S if self._held_elsewhere and patience_s else patience_s):
                self.release()
                return False
            if waited_s > _PATIENCE_S and not has_warned:
                has_warned = True
                print_line(f"{self.path} is locked by another machine; waiting up to {_OTHER_MACHINE_S:.0f} s")
            time.sleep(_AGAIN_S)
        return True

    def _try(self, kind: int) -> bool:
        """One attempt; False where another process holds the folder, or has just removed it."""
        try:
            for folder in reversed([self.path, *self.path.parents]):
                if not folder.is_dir():
                    folder.mkdir()
                    self._made.append(folder)
            taken = [_locked(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), kind)]
        except (FileExistsError, FileNotFoundError):
            return False
        except OSError as error:
            reason = f"({error.strerror}); choose another --output_dir"
            raise UserError(f"output_dir {self.path} cannot be made or locked {reason}") from None
        with suppress(OSError):  # a full disk, or a user's own folder of this name: then without the file
            taken.append(_locked(os.open(self.path / LOCK, _FILE_FLAGS, 0o666), kind) if taken[0] is not None else None)
        self._held_elsewhere = taken[0] is not None and None in taken
        self._handles = [handle for handle in taken if handle is not None]
        targets = (self.path, self.path / LOCK)
        if None not in taken and all(map(_is_still, targets, self._handles)):
            return True
        for handle in self._handles:
            os.close(handle)
        self._handles = []
        return False


def _locked(handle: int, kind: int) -> int | None:
    """The handle with a shared lock that was got by way of `kind`; None where another process holds it."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
        # Not atomic: another process may get it in between, and this one tries again.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:  # a file system without locks
        pass
    return handle


def is_held(folder: Path) -> bool:
    """Whether a run is writing to the folder now."""
    return any(_is_locked(handle) for handle in _handles(folder))


def _handles(folder: Path) -> Iterator[int]:
    for target, flags in ((folder, os.O_RDONLY | os.O_DIRECTORY), (folder / LOCK, _FILE_FLAGS & ~os.O_CREAT)):
        try:
            handle = os.open(target, flags | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            yield handle
        finally:
            os.close(handle)


def _is_locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    return False


def _is_still(target: Path, handle: int) -> bool:
    """Whether what was locked was not removed, and perhaps made again, before it was locked."""
    try:
        return os.path.samestat(os.stat(target), os.fstat(handle))
    except FileNotFoundError:
        return False
