"""A file that grows by whole records and never ends a run: days of training do not end for a log line.

While the disk is full (or a quota is used up, or a network file system fails) records wait in memory. They are written
as soon as the file can be written again, each once: a record that went to the disk in part is completed there.
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

MOST_WAITING = 10_000
"""Records that wait in memory for the disk; when there are more, the oldest are lost."""


class AppendedFile:
    """Appends records to a file. Problems are warnings, printed once until the file can be written again.

    With `lines`, records are text lines without their newline, several processes may append to the file, and a record
    always starts on a line of its own. Otherwise they are bytes and the file belongs to this process.
    """

    def __init__(self, path: Path, *, lines: bool = True) -> None:
        self._path, self._lines = path, lines
        self._file: FileIO | None = None
        self._waiting: deque[bytes] = deque()
        self._rest, self._end = b"", 0  # of the first waiting record: what is not on disk yet, and where the rest ends
        self._failing, self._num_lost = False, 0

    def append(self, record: bytes) -> None:
        """Writes the record now, or as soon as that is possible."""
        if len(self._waiting) >= MOST_WAITING:
            del self._waiting[1]  # the first one may be on disk in part
            self._num_lost += 1
        self._waiting.append(record + b"\n" if self._lines else record)
        self.write()

    def write(self) -> None:
        """Tries to write what waits."""
        try:
            while self._waiting:
                self._write_first(self._opened())
                self._waiting.popleft()
        except OSError as error:
            self.release()  # a file handle of a network file system may be stale: the next try opens the file again
            if not self._failing:
                log.warning(
                    "%s cannot be written (%s); the run goes on, and what belongs there waits in memory",
                    self._path,
                    error.strerror,
                )
            self._failing = True
            return
        if self._failing:
            lost = f", except for {self._num_lost} that are lost" if self._num_lost else ""
            log.warning("%s is written again, with all that had to wait%s", self._path, lost)
        self._failing, self._num_lost = False, 0

    def drop_waiting(self, is_kept: Callable[[bytes], bool]) -> None:
        """Forgets records that still wait, unless `is_kept`; for one who is about to replace the file."""
        self._waiting = deque(record for record in self._waiting if is_kept(record))
        self._rest = b""
        self.release()

    def close(self) -> None:
        """Writes what waits, or says that it is lost, and closes the file; the next record opens it again."""
        self.write()
        if self._waiting:
            log.warning("%s lacks the last %d records", self._path, len(self._waiting) + self._num_lost)
        self.release()

    def _opened(self) -> FileIO:
        if self._file is not None and not self._is_at_path(self._file):
            # Deleted or renamed while it was open: further records would be lost with it.
            self.release()
        if self._file is None:
            if not self._lines:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            # Kept open: NFS flushes at each close.
            self._file = open_regular(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        return self._file

    def _is_at_path(self, file: FileIO) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Closes the file; what waits goes on waiting."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:  # where a network file system says that the disk is full
                log.warning("%s could not be written completely (%s)", self._path, error.strerror)

    def _write_first(self, file: FileIO) -> None:
        data, rest = self._waiting[0], self._rest
        if rest and os.fstat(file.fileno()).st_size == self._end:
            data = rest
        elif (
            rest == b"\n" and self._lines
        ):  # only the line's end was missing, and another process has begun its own line
            data = b""
        elif self._lines and _ends_torn(file):
            data = b"\n" + data
        while data:
            # One unbuffered write in append mode: lines of two processes do not mix. An almost full disk takes a part.
            written = file.write(data)
            data = data[written or 0 :]
            self._rest, self._end = data, file.tell()
        self._rest = b""


def _ends_torn(file: FileIO) -> bool:
    end = file.seek(0, os.SEEK_END)
    if end == 0 or os.pread(file.fileno(), 1, end - 1) == b"\n":
        return False
    # The other process may be in the middle of its write, which then grows: only what stays is torn.
    time.sleep(0.01)
    return file.seek(0, os.SEEK_END) == end
