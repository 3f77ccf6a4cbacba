"""Opens regular files only, and parses JSON safely.

A run folder may contain files that somebody else has put there. Opening a FIFO blocks until a process writes to it,
opening a device may have side effects, and deeply nested JSON exhausts Python's stack. In these cases the functions
here raise an OSError or a ValueError with a one-line message, so callers need to handle only these two.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

LARGEST_JSON = 64 * 2**20
"""Maximum size of a JSON file in bytes. unisono's own JSON files are a thousand times smaller."""

DEEPEST_JSON = 100
"""Maximum depth of nested lists and objects; unisono's own files have fewer than ten levels."""

_KINDS: list[tuple[Callable[[int], bool], str]] = [
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
]


class NotRegular(OSError):
    """The path is not a regular file."""

    def __init__(self, path: str | Path, mode: int) -> None:
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no file")
        super().__init__(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> FileIO:
    """Opens a regular file without buffering; raises NotRegular for anything else. Follows symbolic links.

    `flags` has the same meaning as in `os.open`; with O_CREAT, a missing file is created.
    """
    # Check before opening, because opening a device may have side effects, and again afterwards, because the file may
    # have been replaced; with O_NONBLOCK, a FIFO that appears in between does not block.
    try:
        _require_regular(path, os.stat(path).st_mode)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    try:
        _require_regular(path, os.fstat(handle).st_mode)
        mode = {os.O_RDONLY: "rb", os.O_WRONLY: "wb", os.O_RDWR: "r+b"}[flags & os.O_ACCMODE]
        return FileIO(handle, mode)
    except BaseException:
        os.close(handle)
        raise


def read_json(path: str | Path) -> Any:
    """Parses a JSON file; raises OSError or ValueError for any problem with the file."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST_JSON:
            raise ValueError(f"larger than {LARGEST_JSON >> 20} MiB")
        return parse_json(file.read(LARGEST_JSON + 1))


def parse_json(text: bytes | str) -> Any:
    """Parses a JSON text; raises ValueError for any problem with it."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    data = text.encode(errors="replace") if isinstance(text, str) else text
    if data.count(b"[") + data.count(b"{") > DEEPEST_JSON and _depth(value) > DEEPEST_JSON:
        raise ValueError("nested too deeply")
    return value


def _require_regular(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise NotRegular(path, mode)


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth
