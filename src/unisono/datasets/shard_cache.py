"""A cache of remote files on a local disk, shared by all processes of a machine and limited in size.

One process at a time downloads a file, under a temporary name, and renames it when its size is right. When the cache
exceeds its limit, the least recently used files are removed; a process that is still reading such a file keeps it open.
A file that turns out to be damaged is removed and downloaded again.
"""

from __future__ import annotations

import hashlib
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.atomic_files import atomic_file
from unisono.datasets.locks import locked
from unisono.datasets.sources import Source
from unisono.errors import UserError
from unisono.formatting import format_bytes

_TOUCH_S = 5.0  # minimum seconds between two updates of a file's time of last use
_ABANDONED_S = 3600.0  # age of a partial file that no living process can still be writing
_SUFFIX = ".file"


@dataclass
class ShardCache:
    """Local copies of remote files. Can be pickled; several processes may use the same folder."""

    folder: Path
    limit: int  # bytes
    download: Callable[[Source, str], None] = field(repr=False)

    def __post_init__(self) -> None:
        self._used: dict[str, float] = {}  # name -> when this process last marked it as used
        self._ahead: queue.SimpleQueue[Source | None] | None = None
        self._queued: dict[str, None] = {}
        self._owner = os.getpid()

    def check(self, sources: Iterable[Source]) -> None:
        """Raises UserError if the folder cannot be used, or if the limit is less than the size of the largest file."""
        largest = max(sources, key=lambda source: source.size)
        if largest.size > self.limit:
            raise UserError(
                f"cache_bytes {self.limit} is less than the largest shard ({largest.name}: {largest.size} bytes)"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "locks").mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"cache_dir {self.folder} cannot be created ({error.strerror})") from error

    def local(self, source: Source) -> Source:
        """Returns the local copy of a remote file; downloads the file if the copy is missing."""
        path = self._path(source)
        if not self._is_complete(path, source):
            with locked(self.folder / "locks" / path.stem):
                if not self._is_complete(path, source):
                    self._fetch(source, path)
        now = time.monotonic()
        if now - self._used.get(path.name, -_TOUCH_S) >= _TOUCH_S:
            self._used[path.name] = now
            with suppress(OSError):
                os.utime(path)
        return Source(str(path), source.size, "")

    def forget(self, source: Source) -> None:
        """Removes a copy that is damaged."""
        with suppress(OSError):
            self._path(source).unlink()

    def prefetch(self, sources: Iterable[Source]) -> None:
        """Downloads files in a background thread, in this order; skips files that are cached already."""
        if self._ahead is None or self._owner != os.getpid():  # a thread does not survive a fork
            self._ahead, self._queued, self._owner = queue.SimpleQueue(), {}, os.getpid()
            threading.Thread(target=self._work, args=(self._ahead,), name="unisono shards", daemon=True).start()
        for source in sources:
            if source.url not in self._queued and not self._is_complete(self._path(source), source):
                self._queued[source.url] = None
                self._ahead.put(source)

    def _work(self, ahead: queue.SimpleQueue[Source | None]) -> None:
        while (source := ahead.get()) is not None:
            with suppress(Exception):  # reading the file reports the error
                self.local(source)
            self._queued.pop(source.url, None)

    def _fetch(self, source: Source, path: Path) -> None:
        self._make_room(source.size)
        try:
            with atomic_file(path) as temporary:
                self.download(source, str(temporary))
                size = temporary.stat().st_size
                if size != source.size:
                    raise UserError(f"{source.name} has changed: expected {source.size} bytes, got {size}")
        except UserError:
            raise
        except Exception as error:  # each fsspec file system raises different exception types
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise UserError(f"{source.name} cannot be copied to {self.folder} ({reason})") from error

    def _make_room(self, size: int) -> None:
        """Removes the least recently used files until `size` more bytes fit."""
        with locked(self.folder / "locks" / "room"):
            files = []
            for entry in os.scandir(self.folder):
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(_SUFFIX):
                        files.append((status.st_mtime, status.st_size, entry.path))
                    elif entry.name.endswith(".part") and time.time() - status.st_mtime > _ABANDONED_S:
                        os.unlink(entry.path)
            total = sum(bytes_ for _, bytes_, _ in files)
            for _, bytes_, path in sorted(files):
                if total + size <= self.limit:
                    break
                with suppress(FileNotFoundError):
                    os.unlink(path)
                total -= bytes_
            free = shutil.disk_usage(self.folder).free
            if free < size:
                raise UserError(
                    f"cache_dir {self.folder}: the disk has {format_bytes(free)} left, and a shard needs "
                    f"{format_bytes(size)}; lower cache_bytes or use another disk"
                )

    def _path(self, source: Source) -> Path:
        identity = f"{source.name}\n{source.size}\n{source.stamp}"
        return self.folder / f"{hashlib.sha256(identity.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}{_SUFFIX}"

    def _is_complete(self, path: Path, source: Source) -> bool:
        try:
            return path.stat().st_size == source.size
        except OSError:
            return False

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "limit": self.limit, "download": self.download}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()
