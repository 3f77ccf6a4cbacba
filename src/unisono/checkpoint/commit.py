"""Turns the files of a save into a checkpoint.

Every save writes to its own staging folder. Once all ranks have written and checked their files, rank 0 writes the
manifest and renames the folder, so a checkpoint appears complete or not at all. Only then are old checkpoints deleted.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from unisono import plain_files
from unisono.atomic_files import sync_folder, write_atomically
from unisono.checkpoint.aside import set_aside
from unisono.checkpoint.find import list_steps, step_folder, validate
from unisono.checkpoint.manifest import (
    MANIFEST,
    STATE,
    CheckpointError,
    FileEntry,
    Manifest,
    hash_file,
    read_manifest,
)
from unisono.checkpoint.tensor_file import TensorFile
from unisono.errors import UserError

BEST = "best.json"


def check_usable(folder: Path) -> None:
    """Raises UserError if checkpoints cannot be written to `folder`. Called before a run begins; leaves no file."""
    if not os.path.lexists(folder):
        return  # creating the run folder will show whether it can be written
    if not folder.is_dir():
        kind = "a broken link" if folder.is_symlink() and not folder.exists() else "not a folder"
        raise UserError(f"{folder} is {kind}, so no checkpoint can be saved; remove it, or use another output_dir")
    try:
        # Write a file, because os.access returns True for root, on a read-only mount and on a full disk.
        with tempfile.TemporaryDirectory(prefix=".probe-", dir=folder) as probe:
            Path(probe, MANIFEST).write_bytes(b"{}")
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}), so no checkpoint can be saved; free some space, change "
            "its permissions, or use another output_dir"
        ) from None


def begin(folder: Path, step: int) -> Path:
    """Creates the staging folder of a save in `folder`, under a name that no earlier save has used."""
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / f".staging-{step_folder(step)}-{secrets.token_hex(4)}"
    staging.mkdir()
    return staging


def check_shard(file: Path) -> dict[str, FileEntry]:
    """Flushes a new shard to disk, reads it back and returns its size and hash by name; {} if there is no shard."""
    if not file.exists():
        return {}
    entry = hash_file(file, sync=True)
    TensorFile(file)  # raises if the header does not match the size of the file
    return {file.name: entry}


def commit(
    staging: Path,
    *,
    step: int,
    world: int,
    identity: Mapping[str, Any],
    extra: str,
    shards: Mapping[str, FileEntry],
    replaces: bool = False,
) -> Path:
    """Turns a staging folder with checked shards into the checkpoint of its step, and returns the checkpoint's path.

    If this run already has a complete checkpoint of the step, it is kept and the staging folder is deleted; with
    `replaces`, the new checkpoint replaces it.
    """
    for name, entry in shards.items():
        # The other ranks have checked these files. A different size here means that the machines do not share a folder.
        if (staging / name).stat().st_size != entry.bytes:
            raise OSError(f"{staging / name} differs from what its rank wrote; is the folder on a shared file system?")
    (staging / STATE).write_text(extra, encoding="utf-8")
    files = {**shards, STATE: hash_file(staging / STATE, sync=True)}
    manifest = json.dumps(Manifest(step, world, identity, files).to_json(), indent=1)
    write_atomically(staging / MANIFEST, manifest, durable=True)
    final = staging.parent / step_folder(step)
    replaced: Path | None = None
    if os.path.lexists(final):
        reason = validate(final, identity=identity)
        if reason is None and not replaces:
            discard(staging)
            return final
        aside = set_aside(final, reason)
        replaced = aside if reason is None else None
    os.rename(staging, final)
    sync_folder(final.parent)
    if replaced is not None and not replaced.is_symlink() and _has_only_our_files(replaced):
        discard(replaced)
    return final


def prune(
    folder: Path, *, keep_last: int, committed: Path, identity: Mapping[str, Any], also_keep: Collection[int] = ()
) -> None:
    """Deletes all checkpoints except the `keep_last` newest, the best, `committed`, and the steps in `also_keep`.

    Only complete checkpoints of this run are counted and deleted. A checkpoint to which a user has added files is not
    deleted.
    """
    if keep_last <= 0:
        return
    complete = [path for _, path in list_steps(folder) if validate(path, deep=False, identity=identity) is None]
    best = read_best(folder)
    # After a run went back to an older step, the checkpoint just committed is not the newest.
    keep = {committed, *complete[-keep_last:], *(folder / step_folder(step) for step in also_keep)}
    if best is not None:
        keep.add(folder / step_folder(best["step"]))
    for path in complete:
        if path not in keep and not path.is_symlink() and _has_only_our_files(path):
            discard(path)


def _has_only_our_files(checkpoint: Path) -> bool:
    return set(os.listdir(checkpoint)) <= {MANIFEST, *read_manifest(checkpoint).files}


def discard(path: Path) -> None:
    """Deletes a folder that a save created. Renames it first, so that a half-deleted folder has no valid name."""
    trash = path
    if not path.name.startswith("."):
        trash = path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}")
        os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def write_best(folder: Path, *, step: int, metric: str, value: float) -> None:
    """Records the best checkpoint so far in best.json."""
    best = {"step": step, "metric": metric, "value": value}
    write_atomically(folder / BEST, json.dumps(best, indent=1), durable=True, one_writer=True)


def read_best(folder: Path) -> dict[str, Any] | None:
    """Returns the best checkpoint so far as {step, metric, value}; None if there is none."""
    try:
        best = plain_files.read_json(folder / BEST)
        return {"step": int(best["step"]), "metric": str(best["metric"]), "value": float(best["value"])}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{folder / BEST} cannot be read ({reason}); delete it to continue without a best checkpoint"
        ) from None
