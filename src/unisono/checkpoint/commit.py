"""From loose files to a checkpoint: staging, check, manifest, rename, prune.

A save goes to a staging folder of its own. When every rank's files are written and read back, the manifest is written
last and the folder renamed: a checkpoint appears whole or not at all. Only then are older ones deleted.
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
from unisono.checkpoint.find import OF_ANOTHER_RUN, list_steps, step_folder, validate
from unisono.checkpoint.manifest import (
    MANIFEST,
    STATE,
    CheckpointError,
    FileEntry,
    Manifest,
    hash_file,
    read_manifest,
    write_json,
)
from unisono.checkpoint.tensor_file import TensorFile
from unisono.errors import UserError

BEST = "best.json"


def check_usable(folder: Path) -> None:
    """Says (UserError) if checkpoints could not be written to `folder`, before a run begins; leaves nothing behind."""
    if not os.path.lexists(folder):
        return  # the run's folder around it is checked by whoever makes it
    if not folder.is_dir():
        what = "a link to nowhere" if folder.is_symlink() and not folder.exists() else "not a folder"
        raise UserError(f"{folder} is {what}, and checkpoints belong there; move it away, or use another output_dir")
    try:
        # Really tried, because os.access says yes to root, to a read-only mount and to a full disk.
        with tempfile.TemporaryDirectory(prefix=".probe-", dir=folder) as probe:
            Path(probe, MANIFEST).write_bytes(b"{}")
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}), and checkpoints belong there; make room or set its "
            "permissions, or use another output_dir"
        ) from None


def begin(folder: Path, step: int) -> Path:
    """Makes the staging folder of one attempt; a leftover of an earlier attempt is never in its way."""
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / f".staging-{step_folder(step)}-{secrets.token_hex(4)}"
    staging.mkdir()
    return staging


def check_shard(file: Path) -> dict[str, FileEntry]:
    """Forces a shard just written to disk, reads it back and hashes it; empty for a rank that had nothing to write."""
    if not file.exists():
        return {}
    entry = hash_file(file, sync=True)
    TensorFile(file)  # raises on a header that does not match the file's size
    return {file.name: entry}


def commit(
    staging: Path, *, step: int, world: int, identity: Mapping[str, Any], extra: str, shards: Mapping[str, FileEntry]
) -> Path:
    """Turns a staging folder whose shards are checked into the checkpoint of its step, and returns its path."""
    for name, entry in shards.items():
        # The other ranks checked these files; this finds a folder that is not shared by all machines.
        if (staging / name).stat().st_size != entry.bytes:
            raise OSError(f"{staging / name} is not what its rank has written; is the folder on a shared file system?")
    (staging / STATE).write_text(extra, encoding="utf-8")
    files = {**shards, STATE: hash_file(staging / STATE, sync=True)}
    write_json(staging / MANIFEST, Manifest(step, world, identity, files).to_json())
    sync_folder(staging)
    final = staging.parent / step_folder(step)
    if os.path.lexists(final):
        reason = validate(final, identity=identity)
        if reason is None:
            discard(staging)
            return final
        set_aside(final, _kind_of(reason))
    os.rename(staging, final)
    sync_folder(final.parent)
    return final


def prune(
    folder: Path, *, keep_last: int, committed: Path, identity: Mapping[str, Any], also_keep: Collection[int] = ()
) -> None:
    """Deletes all but the `keep_last` newest checkpoints; the best one, the one just committed and those of the steps
    in `also_keep` always stay.

    What is not a complete checkpoint of this run neither counts nor is deleted: it may be somebody's. Nor is one
    deleted into which somebody has put more than a save does.
    """
    if keep_last <= 0:
        return
    complete = [path for _, path in list_steps(folder) if validate(path, deep=False, identity=identity) is None]
    best = read_best(folder)
    # A run that went back to an older step commits a step that is not the newest; it must survive its own commit.
    keep = {committed, *complete[-keep_last:], *(folder / step_folder(step) for step in also_keep)}
    if best is not None:
        keep.add(folder / step_folder(best["step"]))
    for path in complete:
        if path not in keep and not path.is_symlink() and _is_all_ours(path):  # a link is somebody's own arrangement
            discard(path)


def _is_all_ours(checkpoint: Path) -> bool:
    return set(os.listdir(checkpoint)) <= {MANIFEST, *read_manifest(checkpoint).files}


def discard(path: Path) -> None:
    """Deletes a folder of ours; it loses its name first, so that a killed deletion leaves nothing that looks valid."""
    trash = path
    if not path.name.startswith("."):
        trash = path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}")
        os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def write_best(folder: Path, *, step: int, metric: str, value: float) -> None:
    """Notes which checkpoint is the best so far; the note is replaced in one piece."""
    best = {"step": step, "metric": metric, "value": value}
    write_atomically(folder / BEST, json.dumps(best, indent=1), durable=True, one_writer=True)


def read_best(folder: Path) -> dict[str, Any] | None:
    """The best checkpoint so far as {step, metric, value}, or None if none was marked."""
    try:
        best = plain_files.read_json(folder / BEST)
        return {"step": int(best["step"]), "metric": str(best["metric"]), "value": float(best["value"])}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{folder / BEST} cannot be read ({reason}); delete it to go on without a best") from None


def _kind_of(reason: str) -> str:
    return "other" if reason.startswith(OF_ANOTHER_RUN) else "bad"


def set_aside(path: Path, why: str) -> Path:
    """Renames a checkpoint that must not be used; nothing is lost."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{why}-{number}")):
        number += 1
    os.rename(path, aside)
    return aside


def set_aside_after(
    folder: Path, step: int, identity: Mapping[str, Any], known: Mapping[Path, str] | None = None
) -> list[tuple[Path, str]]:
    """Sets aside what claims to be a checkpoint of a step after `step`, where a run has gone on: (its new path, why).

    Bad ones become `step_….bad-1`, those of another run `step_….other-1`, good ones of a future that was gone back
    before `step_….later-1`. `known` are the bad ones that a search has found already; with it the rest is not read byte
    by byte again.
    """
    moved = []
    for number, path in list_steps(folder):
        if number <= step:
            continue
        reason = (known or {}).get(path) or validate(path, deep=known is None, identity=identity)
        try:
            aside = set_aside(path, "later" if reason is None else _kind_of(reason))
        except OSError as error:  # the next start would go on from it
            raise CheckpointError(
                f"{path} cannot be set aside ({error.strerror}); move it away: the run went on from step {step}"
            ) from None
        moved.append((aside, reason or f"the run went back to step {step}"))
    return moved
