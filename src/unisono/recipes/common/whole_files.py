"""Files and folders of a cache that appear complete or not at all, and what a killed process leaves of them."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from unisono.checkpoint.manifest import sync_folder
from unisono.errors import UserError

_LEFT_BEHIND_S = 3600


def partial_name(path: Path) -> Path:
    """Another name beside a path, to write to until it is complete."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file of the cache, which appears complete or not at all; one of the same name is replaced."""
    partial = partial_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "xb") as new:
            new.write(content)
            new.flush()
            os.fsync(new.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); make room, or use another folder") from None
    finally:
        with suppress(OSError):  # where it has its name by now
            partial.unlink()


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
