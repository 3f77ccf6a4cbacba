"""Appends complete records to a file. A failure to write never ends a run.

While the disk is full, a quota is used up or a network file system fails, records wait in memory. When the file is
writable again, each record is written exactly once, and a partially written record is completed in place.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from unisono.plain_files import open_regular

log = logging.getLogger(__name__)

MAX_PENDING = 10_000
"""Maximum number of records that wait in memory. If there are more, the oldest records are dropped."""


class AppendOnlyFile:
    """Appends records to a file. If the file cannot be written, it warns once and keeps the records.

    If `lines` is set, records are text lines without the newline, several processes may append to the file, and every
    record starts on its own line. Otherwise records are bytes, and only this process writes to the file.
    """

    def __init__(self, path: Path, *, lines: bool = True) -> None:
        self._path, self._lines = path, lines
        self._file: FileIO | None = None
        self._pending: deque[bytes] = deque()
        # The bytes of the first pending record that are not on disk yet, and the file size after a partial write.
        self._unwritten, self._end = b"", 0
        self._failing, self._num_lost = False, 0

    def append(self, record: bytes) -> None:
        """Writes the record now, or as soon as possible."""
        if len(self._pending) >= MAX_PENDING:
            del self._pending[1]  # never drops the first record, which may be partially on disk
            self._num_lost += 1
        self._pending.append(record + b"\n" if self._lines else record)
        self.write()

    def write(self) -> None:
        """Tries to write the pending records."""
        try:
            while self._pending:
                self._write_first(self._opened())
                self._pending.popleft()
        except OSError as error:
            self.release()  # the handle may be stale on a network file system, so the next attempt reopens the file
            if not self._failing:
                log.warning(
                    "%s cannot be written (%s); the run continues and stores the records in memory",
                    self._path,
                    error.strerror,
                )
            self._failing = True
            return
        if self._failing:
            lost = f", except {self._num_lost} that were dropped" if self._num_lost else ""
            log.warning("%s is writable again; all records stored in memory were written%s", self._path, lost)
        self._failing, self._num_lost = False, 0

    def drop_pending(self, is_kept: Callable[[bytes], bool]) -> None:
        """Drops the pending records for which `is_kept` returns False. Call it before replacing the file."""
        self._pending = deque(record for record in self._pending if is_kept(record))
        self._unwritten = b""
        self.release()

    def close(self) -> None:
        """Writes the pending records, or warns that they are lost, and closes the file. The next record reopens it."""
        self.write()
        if self._pending:
            log.warning(
                "the last %d records of %s could not be written", len(self._pending) + self._num_lost, self._path
            )
        self.release()

    def _opened(self) -> FileIO:
        if self._file is not None and not self._is_at_path(self._file):
            # The file was deleted or renamed while open, and further records would be lost.
            self.release()
        if self._file is None:
            if not self._lines:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            # Keep the file open, because NFS flushes at every close.
            self._file = open_regular(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        return self._file

    def _is_at_path(self, file: FileIO) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Closes the file and keeps the pending records."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:  # a network file system reports a full disk here
                log.warning("%s could not be written completely (%s)", self._path, error.strerror)

    def _write_first(self, file: FileIO) -> None:
        data, unwritten = self._pending[0], self._unwritten
        if unwritten and os.fstat(file.fileno()).st_size == self._end:
            data = unwritten
        elif unwritten == b"\n" and self._lines:
            data = b""  # only the newline was missing, and another process has started a new line
        elif self._lines and _ends_in_partial_line(file):
            data = b"\n" + data
        while data:
            # Make a single unbuffered write in append mode, so that lines of two processes do not mix. If the disk is
            # almost full, the call writes only a part of the data.
            written = file.write(data)
            data = data[written or 0 :]
            self._unwritten, self._end = data, file.tell()
        self._unwritten = b""


def _ends_in_partial_line(file: FileIO) -> bool:
    end = file.seek(0, os.SEEK_END)
    if end == 0 or os.pread(file.fileno(), 1, end - 1) == b"\n":
        return False
    # Another process may be in the middle of a write. If the file does not grow, its last line is incomplete.
    time.sleep(0.01)
    return file.seek(0, os.SEEK_END) == end
