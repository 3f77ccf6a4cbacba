"""Writes files and folders atomically: they appear complete or not at all.

The content is written under a temporary name in the same folder and renamed when it is complete. If the process dies
before the rename, at most a hidden temporary file is left; a reader never sees half a file.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def temporary_name(path: Path) -> Path:
    """Returns a hidden name next to `path` that no other writer uses."""
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.part")


@contextmanager
def atomic_file(
    path: Path, *, overwrite: bool = True, durable: bool = False, one_writer: bool = False
) -> Iterator[Path]:
    """Yields a temporary path to write to, and renames it to `path` when the block ends without an exception.

    With `overwrite=False`, an existing `path` raises FileExistsError and does not change. `durable` flushes the file
    and its name to permanent storage, so that both survive a power cut. `one_writer` promises that no other process
    writes `path` at the same time: the temporary name is then fixed, so killed writers leave at most one file behind.
    """
    temporary = path.with_name(f".{path.name}.new") if one_writer else temporary_name(path)
    try:
        if one_writer:
            with suppress(FileNotFoundError):
                os.unlink(temporary)  # a leftover symbolic link would redirect the write, and a FIFO would block it
        yield temporary
        if durable:
            _sync(temporary)
        if overwrite:
            os.replace(temporary, path)
        else:
            _rename_to_new(temporary, path)
        if durable:
            sync_folder(path.parent)
    finally:
        with suppress(OSError):  # already renamed, or never created
            os.unlink(temporary)


def write_atomically(
    path: Path, content: bytes | str | Iterable[bytes], *, durable: bool = False, one_writer: bool = False
) -> None:
    """Writes or replaces a whole file atomically; the options are the same as for `atomic_file`."""
    with atomic_file(path, durable=durable, one_writer=one_writer) as temporary, open(temporary, "xb") as file:
        if isinstance(content, str):
            content = content.encode("utf-8", "replace")
        file.writelines([content] if isinstance(content, bytes) else content)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder next to `path`, and renames it to `path` when the block ends without an exception.

    The rename replaces `path` only if it is an empty folder. Relative links that lead out of the folder stay valid.
    """
    temporary = temporary_name(path)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Flushes a folder's directory entries to permanent storage; otherwise a power cut may undo a rename."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_to_new(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)  # unlike os.rename, os.link never replaces a file
    except FileExistsError:
        raise
    except OSError:  # the file system does not support hard links
        if os.path.lexists(path):
            raise FileExistsError(f"{path} already exists") from None
        os.rename(temporary, path)
