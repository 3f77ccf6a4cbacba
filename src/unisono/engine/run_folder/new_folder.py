"""Prepares a run folder before the run starts: default name, lock, and a check that it contains no foreign files."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.config.resolve import Resolved
from unisono.errors import UserError
from unisono.observe.folder import RunFolder, check_writable
from unisono.observe.lock import FolderLock
from unisono.typed_paths import absolute


def read_own(path: str) -> dict[str, Any] | None:
    """Returns the run.json of a folder, or None; rejects a folder that holds metrics or events but no run.json."""
    record = RunFolder.read(path)
    foreign = [name for name in ("metrics.jsonl", "events.jsonl") if Path(path, name).exists()]
    if record is None and foreign:
        lost = ""
        if Path(path, "checkpoints").is_dir():
            lost = f"; to continue a run whose run.json was lost, use --resume {path} with another folder"
        raise UserError(f"output_dir {path} holds a {foreign[0]} but no unisono run; choose another folder{lost}")
    return record


def lock_folder(resolved: Resolved, recipe: str) -> tuple[Resolved, FolderLock]:
    """Locks the run folder before anything reads it; creates a new folder if the user named none."""
    path = resolved.values["output_dir"]
    if path is not None:
        check_writable(path)
        lock = FolderLock(Path(path))
        lock.take()
        return resolved, lock
    typed = default_folder(recipe)
    check_writable(absolute(typed))
    lock = FolderLock.of_new_folder(Path(absolute(typed)))
    number = lock.path.name.removeprefix(Path(typed).name)
    return resolved.with_values(resolved.sources["output_dir"], output_dir=absolute(typed + number)), lock


def remove_empty(folder: Path) -> None:
    """Removes a folder and its subfolders if they contain no files; ignores errors."""
    for path, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            os.rmdir(path)


def default_folder(recipe: str) -> str:
    """Returns the default run folder, runs/<recipe>-<time>."""
    return f"runs/{recipe.lower()}-{time.strftime('%Y%m%d-%H%M%S')}"
