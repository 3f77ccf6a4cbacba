"""Downloads checkpoints from object storage, and checks them against their manifests."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from unisono.atomic_files import atomic_file, write_atomically
from unisono.checkpoint.commit import begin, discard
from unisono.checkpoint.find import step_folder, validate
from unisono.checkpoint.manifest import MANIFEST, CheckpointError, hash_file
from unisono.errors import UserError
from unisono.mirror.remote_checkpoints import CHECKPOINTS, RemoteCheckpoint, list_checkpoints
from unisono.storage.store import StorageError, Store, patiently

_AT_ONCE = 4  # number of files to download at once


def download_newest(
    store: Store, folder: Path, identity: Mapping[str, Any], note: Callable[[str], None], *, step: int | None = None
) -> Path | None:
    """Downloads the newest valid checkpoint, or the one of a step, into `folder`; returns None if there is none.

    Calls `note` with a line about each damaged checkpoint that it skips. Raises UserError if all of them are damaged.
    """
    checkpoints = patiently(lambda: list_checkpoints(store, store.files(CHECKPOINTS)))
    ours = [each for each in checkpoints if each.is_of(identity) or each.manifest is None]
    reasons = []
    for each in reversed(ours):
        if step is not None and each.step != step:
            continue
        try:
            return download(store, each, folder)
        except CheckpointError as error:
            reasons.append(f"{each.name}: {error}")
            note(f"{store.address}: {each.name} skipped: {error}")
    if reasons:
        raise UserError(f"{store.address} has no valid checkpoint ({'; '.join(reasons)})")
    return None


def download(store: Store, checkpoint: RemoteCheckpoint, folder: Path) -> Path:
    """Downloads a checkpoint into `folder`, where it appears atomically; raises CheckpointError if it is damaged."""
    if checkpoint.problem is not None or checkpoint.manifest is None:
        raise CheckpointError(str(checkpoint.problem))
    target, manifest = folder / step_folder(checkpoint.step), checkpoint.manifest
    if validate(target) is None and (target / MANIFEST).read_bytes() == checkpoint.content:
        return target
    if os.path.lexists(target):
        raise UserError(f"{target} exists and differs from {store.address}/{checkpoint.folder}; move it away")
    staging = begin(folder, checkpoint.step)

    def fetch(name: str) -> None:
        try:
            patiently(lambda: store.download(f"{checkpoint.folder}/{name}", staging / name))
        except StorageError as error:
            if error.is_missing:
                raise CheckpointError(f"{name} is missing") from error
            raise
        if hash_file(staging / name, sync=True) != manifest.files[name]:
            raise CheckpointError(f"the hash of {name} differs from the manifest's")

    try:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(fetch, manifest.files))
        write_atomically(staging / MANIFEST, checkpoint.content, durable=True)
        if (reason := validate(staging, deep=False)) is not None:
            raise CheckpointError(reason)
        os.rename(staging, target)
    except BaseException:
        discard(staging)
        raise
    return target


def download_file(store: Store, name: str, target: Path) -> None:
    """Downloads a file of a run, and creates or replaces the local file atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target) as temporary:
        patiently(lambda: store.download(name, temporary))
