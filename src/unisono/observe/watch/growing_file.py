"""Reads a JSON-lines file while another process appends to it, replaces it or removes it.

Each read continues where the last one ended, so following a file of gigabytes costs no more than its new lines. A
resumed run removes the last steps from metrics.jsonl: if the bytes before the current position have changed since they
were read, the file is read again from its beginning.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from unisono.observe.json_lines import LONGEST_LINE, parse_record
from unisono.plain_files import open_regular

_CHUNK = 2**18
_REMEMBERED = 256  # bytes before the position by which an earlier line is recognised


class GrowingFile:
    """The records of a file, from its beginning on, as they appear."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.restarts = 0
        """Number of times that reading began again, because the file was shortened, replaced or removed."""
        self.damaged = 0
        """Number of lines that are not JSON objects."""
        self.size = 0
        """Size of the file at the last read."""
        self._position, self._tail, self._skips = 0, b"", False

    @property
    def fraction_read(self) -> float:
        """The fraction of the file that has been read."""
        return 1.0 if self._position >= self.size else self._position / self.size

    def records(self) -> Iterator[dict[str, Any] | None]:
        """Yields the new complete records; None means that reading begins again, so all earlier ones are void.

        The caller may stop iterating at any record and continue later.
        """
        with suppress(OSError):
            file = self._opened()
            if file is None:
                self.size = 0
                if self._position:
                    self._begin_again()
                    yield None
                return
            with file:
                self.size = os.fstat(file.fileno()).st_size
                if self._has_changed(file):
                    self._begin_again()
                    yield None
                yield from self._new_records(file)

    def _new_records(self, file: FileIO) -> Iterator[dict[str, Any]]:
        most = _CHUNK
        while True:
            file.seek(self._position)
            block = file.read(most)
            complete = block.rfind(b"\n") + 1
            if not complete:
                if len(block) < most:
                    return  # the last line is still being written
                if most == LONGEST_LINE:  # skips this part of the line, and its other parts as they are read
                    self.damaged += not self._skips
                    self._skips = True
                    self._move_past(block)
                most = LONGEST_LINE
                continue
            start, most = 0, _CHUNK
            while start < complete:
                end = block.index(b"\n", start) + 1
                line, start = block[start:end], end
                self._move_past(line)
                skips, self._skips = self._skips, False
                if skips:
                    continue
                if (record := parse_record(line)) is not None:
                    yield record
                else:
                    self.damaged += bool(line.strip())

    def _move_past(self, data: bytes) -> None:
        self._position += len(data)
        self._tail = (self._tail + data[-_REMEMBERED:])[-_REMEMBERED:]

    def _opened(self) -> FileIO | None:
        try:
            return open_regular(self._path)
        except FileNotFoundError:
            return None

    def _has_changed(self, file: FileIO) -> bool:
        if self.size < self._position:
            return True
        found = os.pread(file.fileno(), len(self._tail), self._position - len(self._tail))
        return found != self._tail

    def _begin_again(self) -> None:
        self._position, self._tail, self._skips, self.damaged = 0, b"", False, 0
        self.restarts += 1
