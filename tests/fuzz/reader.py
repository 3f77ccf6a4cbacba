"""What a fuzzed reader is: valid files, the function that reads them, and the errors that it may raise."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from unisono.errors import UnisonoError

CPU_SECONDS = 10.0
"""CPU time that a reader may take for one case."""

WALL_SECONDS = 300.0
"""Time after which a reader counts as blocked, for instance in a FIFO or in native code."""

MEMORY = 2**30
"""Bytes by which one case may raise the peak memory of the process; its address space is limited to twice that."""

LONGEST_MESSAGE = 5000
"""Characters of an error message, which is one line."""

OUTSIDE = "outside"
"""The folder beside that of a case. No reader may open anything in it, although file names in the cases lead there."""


@dataclass(frozen=True)
class Reader:
    """A reader of foreign bytes. `read` gets a folder with the files of `valid`, one of them damaged."""

    name: str
    module: str
    """The module that reads the bytes."""
    valid: Callable[[Path], object]
    """Writes valid files into an empty folder."""
    read: Callable[[Path], object]
    errors: tuple[type[Exception], ...] = (UnisonoError,)
    """The documented errors; any other exception is a defect."""
    damaged: tuple[str, ...] = ("*",)
    """Patterns of the files that are damaged."""
    words: tuple[bytes, ...] = ()
    """Texts of the format to insert, besides common ones."""
    cpu_seconds: float = CPU_SECONDS
    mended: Callable[[str, bytes], bytes] | None = None
    """Corrects the checksums of a damaged file, so that the reader gets beyond them; applied to half of the cases."""

    def may_damage(self, path: str) -> bool:
        """Whether this file of the folder is damaged."""
        return any(fnmatchcase(path, pattern) for pattern in self.damaged)


def files_in(folder: Path) -> dict[str, bytes]:
    """The files of a folder by their path in it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def write(files: Mapping[str, str | bytes]) -> Callable[[Path], None]:
    """A function that writes these files."""

    def valid(folder: Path) -> None:
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    return valid


def in_memory(make: Callable[[io.BytesIO], object]) -> bytes:
    """The bytes that a function writes to a file object."""
    buffer = io.BytesIO()
    make(buffer)
    return buffer.getvalue()
