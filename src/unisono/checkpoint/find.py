"""Finding the checkpoint to go on from.

Only a folder whose manifest and files agree counts. The search goes from the newest step to the oldest and says what it
skipped and why; what a killed save left behind is listed and does no harm.
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
"""How the reason begins why a good checkpoint is not this run's."""
_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"\.(?:staging|trash)-step_(\d{8,})-[0-9a-f]+")


def step_folder(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


def is_step(text: str) -> bool:
    """Whether a text is the number of a step: `²` is a digit too, and python does not convert thousands of them."""
    return re.fullmatch("[0-9]{1,18}", text) is not None


def list_steps(folder: Path) -> list[tuple[int, Path]]:
    """What bears the name of a checkpoint in a run's folder, oldest step first, valid or not."""
    if not folder.is_dir():
        return []
    matches = [(_STEP.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted((int(match.group(1)), path) for match, path in matches if match)


def leftovers(folder: Path) -> list[Path]:
    """What killed saves and killed deletions left behind; never loaded."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.startswith(LEFTOVER_PREFIXES) and path.is_dir())


def leftovers_until(step: int, paths: Iterable[Path]) -> list[Path]:
    """Those of the leftovers that are of this step or an earlier one."""
    matches = [(_LEFTOVER.fullmatch(path.name), path) for path in paths]
    return [path for match, path in matches if match and int(match.group(1)) <= step]


def validate(path: Path, *, deep: bool = True, identity: Mapping[str, Any] | None = None) -> str | None:
    """Says why a checkpoint must not be loaded, or None if it is complete; `deep` reads and hashes every byte of it.

    With `identity`, the recipe that it belongs to must be the same, and the run where both sides name one.
    """
    if not path.is_dir():
        return "not a folder" if os.path.lexists(path) else "no such folder"
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return str(error)
    # A copy elsewhere may have any name; the name of a step that it is not would make a run skip or repeat samples.
    if _STEP.fullmatch(path.name) and path.name != step_folder(manifest.step):
        return f"its manifest is of step {manifest.step}"
    if identity is not None and (reason := _of_another_run(manifest.identity, identity)) is not None:
        return f"{OF_ANOTHER_RUN}: {reason}"
    if STATE not in manifest.files:
        return f"the manifest lists no {STATE}"
    for name, entry in manifest.files.items():
        if (reason := _check_size(path / name, entry)) is not None:
            return reason
    # The reader takes every shard it finds in the folder: one that does not belong would overwrite good tensors.
    try:
        names = os.listdir(path)
    except OSError as error:  # for instance deleted meanwhile, by the run that it belongs to
        return f"cannot be read ({error.strerror})"
    for name in names:
        if name.endswith(SHARD_SUFFIX) and name not in manifest.files:
            return f"{name} is not in the manifest"
    return _check_hashes(path, manifest.files) if deep else None


def newest_valid(
    folder: Path,
    identity: Mapping[str, Any],
    also: Callable[[Path], str | None] = lambda path: None,
    before: int | None = None,
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest checkpoint of this run that is complete, and what was passed over before it, with the reason.

    `also` may say why one that is complete cannot be used all the same; `before` is the first step not to look at.
    """
    skipped = [(path, "left behind by a save that did not finish") for path in leftovers(folder)]
    for step, path in reversed(list_steps(folder)):
        if before is not None and step >= before:
            continue
        reason = validate(path, identity=identity) or also(path)
        if reason is None:
            return path, skipped
        skipped.append((path, reason))
    return None, skipped


def read_extra(path: Path) -> dict[str, Any]:
    """The state beside the tensors (counters, parameter groups, …) that was given to `Saver.save`."""
    extra = read_json(path / STATE)
    if not isinstance(extra, dict):
        raise CheckpointError(f"{STATE} does not hold an object")
    return extra


def _of_another_run(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    if theirs.get("recipe") != ours.get("recipe"):
        return f"recipe {theirs.get('recipe')}, not {ours.get('recipe')}"
    run, our_run = theirs.get("run"), ours.get("run")
    if run is not None and our_run is not None and run != our_run:  # those of older versions do not say
        return f"run {run}, not {our_run}"
    return None


def _check_size(file: Path, entry: FileEntry) -> str | None:
    if file.is_symlink() or (file.exists() and not file.is_file()):
        return f"{file.name} is not a plain file"
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


def _check_hashes(path: Path, files: Mapping[str, FileEntry]) -> str | None:
    def check(name: str) -> str | None:
        try:
            return None if hash_file(path / name) == files[name] else f"the hash of {name} differs from the manifest's"
        except OSError as error:
            return f"{name} cannot be read ({error})"

    # hashlib lets go of the interpreter lock, so one thread per shard hashes as many shards at once as there are cores.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return next((reason for reason in pool.map(check, files) if reason is not None), None)
