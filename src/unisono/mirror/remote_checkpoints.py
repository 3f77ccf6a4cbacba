"""The checkpoints of a run in object storage.

Objects cannot be renamed, so the manifest, which is uploaded last, makes a checkpoint complete: a folder without a
manifest is not a checkpoint. A checkpoint is set aside by storing its manifest under another name. A checkpoint's
folder has the same name as the local folder. If the store already has another checkpoint of that step, a part of the
manifest's checksum is appended to the name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from unisono.checkpoint.find import step_folder
from unisono.checkpoint.manifest import MANIFEST, SHARD_SUFFIX, STATE, CheckpointError, Manifest, manifest_of
from unisono.plain_files import parse_json
from unisono.storage.store import Store

CHECKPOINTS = "checkpoints"
LATER = "manifest.later.json"
"""Name of the manifest of a checkpoint that belongs to a branch that the run has abandoned."""
_FOLDER = re.compile(rf"{CHECKPOINTS}/(step_(\d{{8,}})(?:-[0-9a-f]{{8}})?)")


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint in object storage that has a manifest."""

    folder: str  # the checkpoint's folder, relative to the store's address
    step: int
    content: bytes  # content of the manifest
    manifest: Manifest | None  # None if the manifest is damaged
    problem: str | None  # why the checkpoint must not be loaded; None if names and sizes of its files are right

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder, for messages."""
        return self.folder.rpartition("/")[2]

    def is_of(self, identity: Mapping[str, Any]) -> bool:
        """Returns whether the checkpoint belongs to a run, or to a recipe if `identity` names no run."""
        stored = {} if self.manifest is None else self.manifest.identity
        return all(stored.get(key) == value for key, value in identity.items() if value is not None)

    def files(self) -> list[str]:
        """Returns the names of the checkpoint's files in the store, without its manifest."""
        return [] if self.manifest is None else [f"{self.folder}/{name}" for name in self.manifest.files]


def in_folders(files: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Groups files by the folder of their checkpoint, complete or not: folder -> name -> size."""
    folders: dict[str, dict[str, int]] = {}
    for path, size in files.items():
        folder, _, name = path.rpartition("/")
        if _FOLDER.fullmatch(folder):
            folders.setdefault(folder, {})[name] = size
    return folders


def list_checkpoints(store: Store, files: Mapping[str, int]) -> list[RemoteCheckpoint]:
    """Returns the checkpoints in the store, oldest step first; `files` are the sizes of its files by name."""
    found = []
    for folder, sizes in in_folders(files).items():
        if MANIFEST in sizes and (content := store.read(f"{folder}/{MANIFEST}")) is not None:
            found.append(_checkpoint(folder, content, sizes))
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.folder))


def _checkpoint(folder: str, content: bytes, sizes: Mapping[str, int]) -> RemoteCheckpoint:
    match = _FOLDER.fullmatch(folder)
    assert match is not None
    step = int(match[2])
    try:
        manifest = manifest_of(parse_json(content))
    except (CheckpointError, ValueError) as error:
        return RemoteCheckpoint(folder, step, content, None, str(error))
    problem = None
    if manifest.step != step:
        problem = f"its manifest says step {manifest.step}"
    for name, entry in manifest.files.items():
        if sizes.get(name) != entry.bytes:
            problem = f"{name} is missing" if name not in sizes else f"{name} has another size than the manifest says"
    return RemoteCheckpoint(folder, step, content, manifest, problem)


def folder_for(step: int, content: bytes, others: Iterable[RemoteCheckpoint]) -> str:
    """Returns the folder for a checkpoint whose manifest is `content`; never that of another complete checkpoint."""
    plain = f"{CHECKPOINTS}/{step_folder(step)}"
    if all(other.folder != plain or other.content == content for other in others):
        return plain
    return f"{plain}-{hashlib.sha256(content).hexdigest()[:8]}"


def leftovers(files: Mapping[str, int], newest: int) -> list[str]:
    """Returns the files of interrupted uploads up to step `newest`: their checkpoint's folder has no manifest."""
    names = []
    for folder, sizes in in_folders(files).items():
        match = _FOLDER.fullmatch(folder)
        assert match is not None
        if int(match[2]) <= newest and not {MANIFEST, LATER} & sizes.keys():
            names += [f"{folder}/{name}" for name in sizes if name == STATE or name.endswith(SHARD_SUFFIX)]
    return names
