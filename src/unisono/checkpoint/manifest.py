"""The manifest of a checkpoint lists its files, each with size and SHA-256, and contains a checksum of the list.

The manifest is written last, so a folder without a manifest is not a checkpoint. A single flipped bit in any of the
files is detected before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono import plain_files
from unisono.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
SHARD_SUFFIX = ".safetensors"
_BLOCK = 4 * 1024 * 1024
# A manifest is not trusted: it must not make unisono open files outside its folder.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class CheckpointError(UserError):
    """A checkpoint is damaged or incomplete, belongs to another run, or does not match the model."""


@dataclass(frozen=True)
class FileEntry:
    """Size and hash of one file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The step of a checkpoint, the number of ranks that saved it, the run it belongs to, and its files."""

    step: int
    world: int
    identity: Mapping[str, Any]
    files: Mapping[str, FileEntry]

    @property
    def total_bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.bytes for entry in self.files.values())

    def to_json(self) -> dict[str, Any]:
        """Returns the content of manifest.json, with its checksum."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "step": self.step,
            "world": self.world,
            "identity": dict(self.identity),
            "files": {name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in sorted(self.files.items())},
        }
        return {**body, "sha256": _checksum(body)}


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks the manifest of a checkpoint; raises CheckpointError if it is damaged or invalid."""
    return manifest_of(read_json(folder / MANIFEST))


def manifest_of(data: Any) -> Manifest:
    """Checks the parsed content of a manifest.json; raises CheckpointError if it is damaged or invalid."""
    try:
        body = {key: value for key, value in data.items() if key != "sha256"}
        if body["format"] != FORMAT:
            raise CheckpointError(f"{MANIFEST} has format {body['format']!r}; this version of unisono reads {FORMAT}")
        if data["sha256"] != _checksum(body):
            raise CheckpointError(f"{MANIFEST} is damaged (wrong checksum)")
        files = {name: FileEntry(int(entry["bytes"]), str(entry["sha256"])) for name, entry in body["files"].items()}
        manifest = Manifest(int(body["step"]), int(body["world"]), dict(body["identity"]), files)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is not a unisono manifest ({type(error).__name__}: {error})") from None
    for name in manifest.files:
        if _NAME.fullmatch(name) is None:
            raise CheckpointError(f"{MANIFEST} names {name!r}, which is not a file of this folder")
    return manifest


def read_json(file: Path) -> Any:
    """Parses a JSON file of a checkpoint; raises CheckpointError if it cannot be read."""
    try:
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise CheckpointError(f"{file.name} is not a regular file")
        return plain_files.read_json(file)
    except FileNotFoundError:
        raise CheckpointError(f"no {file.name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file.name} cannot be read ({error})") from None


def hash_file(path: Path, *, sync: bool = False) -> FileEntry:
    """Returns the size and SHA-256 of a file. With `sync`, first flushes the file to permanent storage."""
    digest, size, block = hashlib.sha256(), 0, bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        while count := file.readinto(block):
            digest.update(memoryview(block)[:count])
            size += count
    return FileEntry(size, digest.hexdigest())


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
