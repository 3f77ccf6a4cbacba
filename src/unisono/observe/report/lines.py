"""Reads a file of JSON lines that may be huge, damaged, or just being written."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from unisono.errors import UserError
from unisono.plain_files import open_regular, parse_json

LONGEST_LINE = 4 * 2**20


class JsonLines:
    """The objects of a file, one at a time; lines that are damaged or half-written are skipped and counted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.damaged = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._path.is_file():  # also what only looks like one: opening a pipe would wait for ever
            return
        try:
            with BufferedReader(open_regular(self._path)) as file:
                while line := file.readline(LONGEST_LINE):
                    if not line.endswith(b"\n"):  # the end of the file, or the beginning of something endless
                        self.damaged += 1
                        while line and not line.endswith(b"\n"):
                            line = file.readline(LONGEST_LINE)
                        continue
                    try:
                        record = parse_json(line)
                    except ValueError:
                        record = None
                    if isinstance(record, dict):
                        yield record
                    else:
                        self.damaged += bool(line.strip())
        except OSError as error:
            raise UserError(f"{self._path} cannot be read ({error.strerror}); check its permissions") from None
