"""Files and folders of a cache that appear complete or not at all, and what a killed process leaves of them."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

from unisono.atomic_files import write_atomically
from unisono.errors import UserError

_LEFT_BEHIND_S = 3600


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file of the cache, which appears complete or not at all; one of the same name is replaced."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content, durable=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); make room, or use another folder") from None


def remove_leftovers(folder: Path) -> None:
    """Removes what a killed process has half written; what grew lately may still be written by somebody."""
    for partial in folder.glob(".*.part"):
        with suppress(OSError):  # another process was faster
            is_folder = partial.is_dir() and not partial.is_symlink()
            latest = max(path.stat().st_mtime for path in (partial, *(partial.iterdir() if is_folder else ())))
            if time.time() - latest <= _LEFT_BEHIND_S:
                continue
            if is_folder:
                shutil.rmtree(partial, ignore_errors=True)
            else:
                partial.unlink()
