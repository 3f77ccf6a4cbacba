"""Describes the files of a dataset, which are local files or URLs for fsspec, and reads byte ranges from them."""

from __future__ import annotations

import math
import os
import stat
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from typing import Any, TypeVar

from unisono.errors import UserError
from unisono.plain_files import open_regular
from unisono.storage.addresses import is_remote, shown
from unisono.storage.file_systems import file_system

T = TypeVar("T")

_OPEN_FILES = 64  # maximum number of open files per process
_THREADS = 16  # number of threads that examine remote files
# Time limit and pauses of retries while a server cannot be reached.
_PATIENCE_S, _FIRST_PAUSE_S, _LONGEST_PAUSE_S = 120.0, 0.25, 10.0
_PERMANENT = (UserError, FileNotFoundError, PermissionError, IsADirectoryError, ImportError, TypeError, ValueError)
_STAMPS = ("ETag", "etag", "generation", "md5Hash", "sha256", "blob_id", "LastModified", "Last-Modified", "mtime")


@dataclass(frozen=True)
class Source:
    """A file as it was when it was examined. Readers reject a file that has changed since then."""

    url: str  # an absolute path, or a URL
    size: int
    stamp: str  # differs if the content differs: the modification time, or the entity tag of a URL; "": unknown

    @property
    def name(self) -> str:
        """The URL without secrets; it identifies the file in an index and in messages."""
        return shown(self.url)

    @property
    def is_remote(self) -> bool:
        """Whether fsspec opens this file."""
        return is_remote(self.url)


def examine(urls: Sequence[str], **options: Any) -> list[Source]:
    """Looks up the size and the stamp of every file; raises UserError if a file cannot be read."""
    systems: dict[str, Any] = {}
    for url in urls:
        protocol = url.partition("://")[0]
        if is_remote(url) and protocol not in systems:
            systems[protocol] = file_system(url, **options)
    if not systems:
        return [_examined(url, None) for url in urls]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda url: _examined(url, systems.get(url.partition("://")[0])), urls))


def _examined(url: str, system: Any) -> Source:
    try:
        if system is None:
            status = os.stat(url)
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{url} is not a file")
            return Source(url, status.st_size, str(status.st_mtime_ns))
        info = system.info(url)
    except UserError:
        raise
    except Exception as error:  # each fsspec file system raises different exception types
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise UserError(f"{shown(url)} cannot be read ({reason})") from error
    stamp = next((str(info[name]) for name in _STAMPS if info.get(name)), "")
    if info.get("size") is None:
        raise UserError(f"{shown(url)}: the server does not report the file's size, so parts of it cannot be read")
    return Source(url, int(info["size"]), stamp)


def is_transient(error: Exception) -> bool:
    """Returns whether a request may succeed later: the server cannot be reached, or is overloaded."""
    status = getattr(error, "status", None) or getattr(error, "code", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in (408, 429)
    return not isinstance(error, _PERMANENT)


def _without_url(error: Exception, source: Source) -> OSError:
    """Returns an error without the message of `error`, which may contain the URL and its secrets."""
    kind = next((each for each in (FileNotFoundError, PermissionError) if isinstance(error, each)), OSError)
    status = getattr(error, "status", None)
    return kind(f"{source.name}: {type(error).__name__}{f' {status}' if isinstance(status, int) else ''}")


@dataclass(eq=False)
class RangeReader:
    """Reads ranges of bytes. Keeps files open, can be pickled, and can be used by several threads."""

    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        _readers.add(self)
        self._lock = threading.Lock()
        self._files: OrderedDict[str, FileIO] = OrderedDict()
        self._systems: dict[tuple[int, str], Any] = {}
        self._reported = -math.inf

    def read(self, source: Source, start: int, count: int) -> bytes:
        """Returns `count` bytes from `start`, or fewer at the end of the file; raises OSError on failure."""
        # A damaged index or header may ask for more bytes than there are, or than fit in memory.
        stop = min(start + count, source.size)
        if not source.is_remote:
            file = self._open(source)
            return read_exactly(file, start, stop - start) if stop > start >= 0 else b""
        if stop <= start:
            return b""
        return self._patiently(source, lambda: self._fetched(source, start, stop))

    def _fetched(self, source: Source, start: int, stop: int) -> bytes:
        data: bytes = self._system(source.url).cat_file(source.url, start=start, end=stop)
        if len(data) != stop - start:
            raise OSError(f"{source.name}: expected {stop - start} bytes at offset {start}, got {len(data)}")
        return data

    def advise(self, source: Source, start: int, count: int) -> None:
        """Makes the system read a range of a local file ahead, without waiting for it."""
        with suppress(OSError, UserError, AttributeError):  # reading reports the error; not every system has this call
            os.posix_fadvise(self._open(source).fileno(), start, count, os.POSIX_FADV_WILLNEED)

    def download(self, source: Source, path: str) -> None:
        """Copies a remote file to a new local one."""
        self._patiently(source, lambda: self._system(source.url).get_file(source.url, path))

    def _patiently(self, source: Source, work: Callable[[], T]) -> T:
        """Calls `work`, and retries with growing pauses while a server cannot be reached."""
        started, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                return work()
            except Exception as error:  # each fsspec file system raises different exception types
                if not is_transient(error) or time.monotonic() - started > _PATIENCE_S:
                    if source.url == source.name or isinstance(error, UserError):
                        raise
                    raise _without_url(error, source) from None
                if pause == _FIRST_PAUSE_S and self._may_report():
                    text = f"{source.name}: {type(error).__name__}; retrying for up to {_PATIENCE_S:.0f} s"
                    print(f"unisono: {text}", file=sys.stderr, flush=True)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            with self._lock:
                self._systems = {}  # reconnects

    def _may_report(self) -> bool:
        """Returns whether to print a message: the last one is so old that this must be a new outage."""
        with self._lock:
            before, self._reported = self._reported, time.monotonic()
        return time.monotonic() - before > _PATIENCE_S

    def _open(self, source: Source) -> FileIO:
        with self._lock:
            file = self._files.get(source.url)
            if file is None:
                file = self._files[source.url] = open_regular(source.url)
                while len(self._files) > _OPEN_FILES:
                    self._files.popitem(last=False)  # closed as soon as no other thread reads from it
            self._files.move_to_end(source.url)
        status = os.fstat(file.fileno())
        is_other = status.st_size != source.size or source.stamp not in ("", str(status.st_mtime_ns))
        if is_other or not status.st_nlink:  # the file was removed or replaced
            with self._lock:
                self._files.pop(source.url, None)
            if not is_other:
                return self._open(source)
            raise UserError(f"{source.name} has changed since this run read its index; start the run again")
        return file

    def _system(self, url: str) -> Any:
        key = os.getpid(), url.partition("://")[0]
        with self._lock:
            if key not in self._systems:
                self._systems = {key: file_system(url, **self.options)}
            return self._systems[key]

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()


_readers: weakref.WeakSet[RangeReader] = weakref.WeakSet()


def _renew_locks() -> None:
    """Replaces locks in a forked process: a thread of the parent, which no longer exists, may have held them."""
    for reader in list(_readers):
        reader._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


def read_exactly(file: FileIO, start: int, count: int) -> bytes:
    """Reads `count` bytes, or up to the end of a local file, because a single read may return less."""
    data = os.pread(file.fileno(), count, start)
    while len(data) < count:
        more = os.pread(file.fileno(), count - len(data), start + len(data))
        if not more:
            break
        data += more
    return data
