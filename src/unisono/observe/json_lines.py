"""Reads JSON-lines files, which may be huge, damaged, or still being written."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from unisono.errors import UserError
from unisono.plain_files import open_regular, parse_json

LONGEST_LINE = 4 * 2**20


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Returns the JSON object in a line; None for a damaged line or another JSON value."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class JsonLines:
    """Iterates over the JSON objects of a file. Skips damaged and incomplete lines, and counts them in `damaged`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.damaged = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._path.is_file():  # does not exist, or is a pipe, for instance
            return
        try:
            with BufferedReader(open_regular(self._path)) as file:
                while line := file.readline(LONGEST_LINE):
                    if not line.endswith(b"\n"):  # the line is incomplete (the last one) or too long
                        self.damaged += 1
                        while line and not line.endswith(b"\n"):
                            line = file.readline(LONGEST_LINE)
                        continue
                    if (record := parse_record(line)) is not None:
                        yield record
                    else:
                        self.damaged += bool(line.strip())
        except OSError as error:
            raise UserError(f"{self._path} cannot be read ({error.strerror}); check its permissions") from None
