"""Finds the checkpoint to resume from.

Only a folder whose files match its manifest is a valid checkpoint. The search goes from the newest step to the oldest
and also returns the folders that it skipped, with the reasons. Folders of an interrupted save are never loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from unisono.checkpoint.manifest import (
    SHARD_SUFFIX,
    STATE,
    CheckpointError,
    FileEntry,
    hash_file,
    read_json,
    read_manifest,
)

LEFTOVER_PREFIXES = (".staging-", ".trash-")
OF_ANOTHER_RUN = "manifest of another run"
"""Prefix of the reason for rejecting a complete checkpoint that belongs to another run."""
_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"\.(?:staging|trash)-step_(\d{8,})-[0-9a-f]+")


def step_folder(step: int) -> str:
    """Returns the name of a checkpoint's folder."""
    return f"step_{step:08d}"


def is_step(text: str) -> bool:
    """Whether a text is a step number: at most 18 of the digits 0 to 9. str.isdigit would also accept `²`."""
    return re.fullmatch("[0-9]{1,18}", text) is not None


def list_steps(folder: Path) -> list[tuple[int, Path]]:
    """Returns all paths in a folder that are named like a checkpoint, valid or not, oldest step first."""
    if not folder.is_dir():
        return []
    matches = [(_STEP.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted((int(match.group(1)), path) for match, path in matches if match)


def leftovers(folder: Path) -> list[Path]:
    """Returns folders that interrupted saves and deletions left behind."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.startswith(LEFTOVER_PREFIXES) and path.is_dir())


def leftovers_until(step: int, paths: Iterable[Path]) -> list[Path]:
    """Returns the leftover folders in `paths` that belong to `step` or to an earlier step."""
    matches = [(_LEFTOVER.fullmatch(path.name), path) for path in paths]
    return [path for match, path in matches if match and int(match.group(1)) <= step]


Damage = Callable[[Path, Mapping[str, FileEntry]], str | None]
"""A function that returns why a file in a checkpoint's folder differs from the saved file, or None if none differs."""


def hash_all(path: Path, files: Mapping[str, FileEntry]) -> str | None:
    """Hashes the files of a checkpoint in this process; returns a reason that names the first damaged file, or None."""
    # hashlib releases the GIL, so threads hash several shards at once.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        reasons = pool.map(lambda name: why_damaged(path / name, files[name]), files)
        return next((reason for reason in reasons if reason is not None), None)


def why_damaged(file: Path, entry: FileEntry) -> str | None:
    """Reads a whole file and returns why it differs from the saved file, or None if it does not."""
    try:
        return None if hash_file(file) == entry else f"the hash of {file.name} differs from the manifest's"
    except OSError as error:
        return f"{file.name} cannot be read ({error})"


def validate(
    path: Path, *, deep: bool = True, identity: Mapping[str, Any] | None = None, damage: Damage = hash_all
) -> str | None:
    """Returns why a checkpoint must not be loaded, or None if it is complete.

    If `deep` is set, `damage` also reads and hashes all of its files. If `identity` is given, the checkpoint must
    belong to the same recipe and, if both identities name a run, to the same run.
    """
    if not path.is_dir():
        return "not a folder" if os.path.lexists(path) else "no such folder"
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return str(error)
    # A copy may have any name except that of another step: a run that resumes from it would skip or repeat samples.
    if _STEP.fullmatch(path.name) and path.name != step_folder(manifest.step):
        return f"its manifest says step {manifest.step}"
    if identity is not None and (reason := _of_another_run(manifest.identity, identity)) is not None:
        return f"{OF_ANOTHER_RUN}: {reason}"
    if STATE not in manifest.files:
        return f"the manifest lists no {STATE}"
    for name, entry in manifest.files.items():
        if (reason := _check_size(path / name, entry)) is not None:
            return reason
    # The reader loads every shard in the folder, and a shard that does not belong there would overwrite good tensors.
    try:
        names = os.listdir(path)
    except OSError as error:  # for instance because its run has just deleted it
        return f"cannot be read ({error.strerror})"
    for name in names:
        if name.endswith(SHARD_SUFFIX) and name not in manifest.files:
            return f"{name} is not in the manifest"
    return damage(path, manifest.files) if deep else None


def newest_valid(
    folder: Path,
    identity: Mapping[str, Any],
    why_unusable: Callable[[Path], str | None] = lambda path: None,
    before: int | None = None,
    damage: Damage = hash_all,
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Returns the newest complete checkpoint of this run, and (path, reason) of every folder skipped before it.

    `why_unusable` may reject a complete checkpoint by returning a reason. If `before` is given, only earlier steps are
    considered. `damage` hashes the files.
    """
    skipped = [(path, "left behind by an interrupted save") for path in leftovers(folder)]
    for step, path in reversed(list_steps(folder)):
        if before is not None and step >= before:
            continue
        reason = validate(path, identity=identity, damage=damage) or why_unusable(path)
        if reason is None:
            return path, skipped
        skipped.append((path, reason))
    return None, skipped


def read_extra(path: Path) -> dict[str, Any]:
    """Returns the state other than tensors (counters, the optimizer's scalars, …) that `Saver.save` stored."""
    extra = read_json(path / STATE)
    if not isinstance(extra, dict):
        raise CheckpointError(f"{STATE} does not contain a JSON object")
    return extra


def _of_another_run(stored: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    if stored.get("recipe") != ours.get("recipe"):
        return f"recipe {stored.get('recipe')}, not {ours.get('recipe')}"
    run, our_run = stored.get("run"), ours.get("run")
    if run is not None and our_run is not None and run != our_run:  # older versions of unisono did not store the run
        return f"run {run}, not {our_run}"
    return None


def _check_size(file: Path, entry: FileEntry) -> str | None:
    if file.is_symlink() or (file.exists() and not file.is_file()):
        return f"{file.name} is not a regular file"
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} cannot be read ({error})"
    if size != entry.bytes:
        change = "shorter" if size < entry.bytes else "longer"
        return f"{file.name} is {abs(size - entry.bytes)} bytes {change} than the manifest says"
    return None
