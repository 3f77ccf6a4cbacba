"""Reads the records that are appended to a JSON-lines file while a run writes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from unisono.observe.json_lines import parse_record
from unisono.plain_files import open_regular

_CHUNK = 4 * 2**20  # bytes read at once, so that a long file does not fill the memory


class Tail:
    """Reads new records of a file. Begins again if the file was shortened or replaced, as when a run resumes."""

    def __init__(self, path: Path) -> None:
        self._path, self._position, self._inode = path, 0, -1
        self.at_end = False
        """Whether the last call of `read` reached the end of the file."""

    def read(self) -> list[dict[str, Any]]:
        """Returns the next records, at most a few megabytes at once; empty if there are none."""
        try:
            with open_regular(self._path) as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._position:
                    self._position, self._inode = 0, status.st_ino
                file.seek(self._position)
                data = file.read(_CHUNK) or b""
        except OSError:  # it does not exist yet, or a network file system fails for a moment
            self.at_end = True
            return []
        self.at_end = len(data) < _CHUNK
        end = data.rfind(b"\n") + 1
        if not end and not self.at_end:
            end = len(data)  # one line of megabytes, which no run writes
        self._position += end
        return [record for line in data[:end].splitlines() if (record := parse_record(line)) is not None]
