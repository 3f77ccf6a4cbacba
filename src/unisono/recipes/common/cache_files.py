"""Writes cache files atomically, and removes the partial files of killed processes."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

from unisono.atomic_files import write_atomically
from unisono.errors import UserError

_ABANDONED_S = 3600  # in seconds; a partial file that has not grown for this long is abandoned


def write_cache_file(path: Path, content: bytes) -> None:
    """Writes a file atomically; replaces an existing file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content, durable=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); free some space or use another folder") from None


def remove_leftovers(folder: Path) -> None:
    """Removes partial files and folders of killed processes, except recent ones, which may still be growing."""
    for partial in folder.glob(".*.part"):
        with suppress(OSError):  # another process removed it first
            is_folder = partial.is_dir() and not partial.is_symlink()
            latest = max(path.stat().st_mtime for path in (partial, *(partial.iterdir() if is_folder else ())))
            if time.time() - latest <= _ABANDONED_S:
                continue
            if is_folder:
                shutil.rmtree(partial, ignore_errors=True)
            else:
                partial.unlink()
