"""Restores a run from object storage into a local run folder, before the run starts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.checkpoint.aside import set_aside_after
from unisono.checkpoint.commit import BEST
from unisono.checkpoint.find import list_steps
from unisono.checkpoint.manifest import read_manifest
from unisono.errors import UserError
from unisono.mirror.download import download_file, download_newest
from unisono.mirror.local_folders import checkpoint_folder
from unisono.mirror.remote_checkpoints import CHECKPOINTS
from unisono.mirror.run_record import continues, other_run, read_record
from unisono.observe.folder import EVENTS, METRICS, RUN, RunFolder
from unisono.storage.store import StorageError, Store, patiently

_RECORDS = (METRICS, EVENTS, f"{CHECKPOINTS}/{BEST}")


def restore_run(folder: Path, address: str, recipe: str, *, resume: str, is_named: bool) -> list[str]:
    """Downloads the run at an address unless the run folder is up to date; returns notes for the user.

    `is_named` tells whether the user chose the run folder. A run folder with a default name never continues a run.
    """
    store, local = Store(address), RunFolder.read(folder)
    try:
        theirs = patiently(lambda: read_record(store))
    except StorageError as error:
        if local is None:  # only the store could tell whether there is a run to continue
            raise
        return [f"the copy cannot be reached ({error}); continuing from the run folder"]
    if theirs is None:
        return []
    if local is None:
        _check_new(folder, store, theirs, recipe, resume, is_named=is_named)
    elif local.get("id") != theirs.get("id"):
        raise other_run(store)
    elif continues(local, theirs):
        return []
    return _restore(folder, store, theirs)


def _check_new(
    folder: Path, store: Store, theirs: Mapping[str, Any], recipe: str, resume: str, *, is_named: bool
) -> None:
    """Raises UserError if this command is not meant to continue the run in the store."""
    if theirs["recipe"] != recipe:
        raise UserError(f"{store.address} holds a run of {theirs['recipe']}, not {recipe}; choose another address")
    if resume == "never":
        raise UserError(f"resume never: {store.address} already holds a run; choose another address, or resume auto")
    if not is_named:
        raise UserError(
            f"mirror {store.address} already holds a run; to continue it: --output_dir {store.address}; otherwise "
            "choose another address"
        )
    if list_steps(folder / CHECKPOINTS):
        raise UserError(f"{folder} has checkpoints but no run.json, so it cannot be compared with {store.address}")


def _restore(folder: Path, store: Store, theirs: Mapping[str, Any]) -> list[str]:
    notes: list[str] = []
    identity = {"recipe": theirs["recipe"], "run": theirs.get("id")}
    checkpoints = folder / CHECKPOINTS
    newest = download_newest(store, checkpoints, identity, notes.append)
    step = 0 if newest is None else read_manifest(newest).step
    # The run was continued elsewhere from `step`, so later local checkpoints belong to an abandoned branch.
    notes += [f"set aside as {path.name}: {why}" for path, why in set_aside_after(checkpoints, step, identity, {})]
    files = patiently(store.files)
    for name in (*_RECORDS, *(name for name in files if _is_preview(name))):
        if name in files:
            download_file(store, name, folder / name)
    download_file(store, RUN, folder / RUN)  # last, because run.json marks the folder as complete
    return [*notes, f"restored from {store.address}" + (f": step {step}" if step else "")]


def _is_preview(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and parts[0] == "previews" and parts[1] not in ("", ".", "..")


def fetch_to_resume(address: str, recipe: str) -> tuple[Path, list[str]]:
    """Downloads the checkpoint at an address, or the newest one of the run there; returns its path and notes."""
    run, step = split_step(address)
    store, notes = Store(run), list[str]()
    folder = checkpoint_folder(run)
    path = download_newest(store, folder / CHECKPOINTS, {"recipe": recipe}, notes.append, step=step)
    if path is None:
        of_step = "" if step is None else f" of step {step}"
        raise UserError(f"resume: {run} has no checkpoint of {recipe}{of_step}")
    if patiently(lambda: read_record(store)) is not None:
        download_file(store, RUN, folder / RUN)
    for _, other in list_steps(folder / CHECKPOINTS):  # delete checkpoints that earlier commands downloaded
        if other != path:
            shutil.rmtree(other, ignore_errors=True)
    return path, notes


def split_step(address: str) -> tuple[str, int | None]:
    """Splits the address of a run or checkpoint into the run's address and the checkpoint's step (None for a run)."""
    run, _, name = address.rpartition(f"/{CHECKPOINTS}/step_")
    digits = name.partition("-")[0]
    return (run, int(digits)) if run and digits.isascii() and digits.isdecimal() else (address, None)
