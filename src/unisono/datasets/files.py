"""A dataset of folders with millions of files, with a compact index of their names."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from unisono.atomic_files import atomic_folder, write_atomically
from unisono.datasets.index import Array, default_folder
from unisono.datasets.locks import locked
from unisono.errors import UserError
from unisono.plain_files import open_regular, parse_json

_NAMES, _ENDS, _FOLDERS = "names.npy", "ends.npy", "folders.json"


class Files(Dataset[Any]):
    """The files of a folder and its subfolders, in the order of their names.

    A sample is a dict: `path` (absolute), `name` (relative to the folder), `folder` (the relative path of its
    parent folder, often the class) and, unless `read` is False, `data` (the content as bytes).
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        pattern: str = "*",
        read: bool = True,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        index_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """`pattern`, such as `*.jpg`, selects files by name. Skips hidden files and symbolic links to folders."""
        self.root, self.pattern, self.read, self.transform = (
            os.path.abspath(os.path.expanduser(root)),
            pattern,
            read,
            transform,
        )
        if not os.path.isdir(self.root):
            raise UserError(f"{self.root} is not a folder")
        base = default_folder() if index_dir is None else Path(index_dir).expanduser().absolute()
        try:
            self._folder = _open_index(base, self.root, pattern)
        except OSError as error:
            raise UserError(f"the index of {self.root} cannot be written to {base} ({error.strerror})") from error
        try:
            self._load()
        except Exception as error:  # numpy raises many exception types for damaged files
            raise UserError(f"the index {self._folder} is damaged; delete this folder") from error

    def _load(self) -> None:
        self._names: Array = np.load(self._folder / _NAMES, mmap_mode="r", allow_pickle=False)
        self._ends: Array = np.load(self._folder / _ENDS, mmap_mode="r", allow_pickle=False)
        with open_regular(self._folder / _FOLDERS) as file:
            described = parse_json(file.read())
        self.folders: list[str] = [name for name, _, count in described if count]
        """The sorted relative paths of the folders that contain files, for instance to number the classes."""
        self._folder_ends: Array = np.cumsum([count for _, _, count in described if count])
        if (self._names.dtype, self._ends.dtype) != (np.uint8, np.uint64) or self._folder_ends[-1] != len(self):
            raise ValueError("the arrays of the index are inconsistent")
        if any(folder.startswith("/") or ".." in folder.split("/") for folder in self.folders):
            raise ValueError("a folder is outside the tree")

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no file {index}; the dataset has {len(self)} files")
        start = int(self._ends[index - 1]) if index else 0
        base = os.fsdecode(self._names[start : int(self._ends[index])].tobytes())
        if not base or "/" in base or "\0" in base or base in (".", ".."):
            raise UserError(f"the index {self._folder} is damaged; delete this folder")
        folder = self.folders[int(np.searchsorted(self._folder_ends, index, side="right"))]
        name = os.path.join(folder, base)
        sample: dict[str, Any] = {"path": os.path.join(self.root, name), "name": name, "folder": folder}
        if self.read:
            try:
                with open_regular(sample["path"]) as file:
                    sample["data"] = file.readall()
            except OSError as error:
                raise UserError(f"{sample['path']} cannot be read ({error.strerror})") from error
        return sample if self.transform is None else self.transform(sample)

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_names", "_ends", "_folder_ends", "folders")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load()


def _open_index(base: Path, root: str, pattern: str) -> Path:
    """Returns the index folder of a tree; builds the index if it is missing or a folder of the tree has changed."""
    family = base / f"files-1-{_digest([root, pattern])}"
    if (current := _current(family, root)) is not None:
        return current
    family.mkdir(parents=True, exist_ok=True)
    with locked(family / ".lock"):
        current = _current(family, root)
        return current if current is not None else _build(family, root, pattern)


def _current(family: Path, root: str) -> Path | None:
    """Returns the index if no folder's modification time has changed, so no file was added, removed or renamed."""
    if not family.is_dir():
        return None
    for version in sorted(family.glob("[0-9a-f]*")):
        with suppress(OSError, ValueError, TypeError):
            with open_regular(version / _FOLDERS) as file:
                described = parse_json(file.read())
            if all(os.stat(os.path.join(root, name)).st_mtime_ns == stamp for name, stamp, _ in described):
                return version
    return None


def _build(family: Path, root: str, pattern: str) -> Path:
    started = time.monotonic()
    names, ends, described = bytearray(), array("Q"), list[tuple[str, int, int]]()
    for folder, stamp, files in _walk(root, pattern):
        for name in files:
            names += os.fsencode(name)
            ends.append(len(names))
        described.append((folder, stamp, len(files)))
    if not ends:
        raise UserError(f"{root}: no files match {pattern}")
    target = family / _digest(described)
    if target.exists():
        shutil.rmtree(target, ignore_errors=True)
    with atomic_folder(target) as new:
        np.save(new / _NAMES, np.frombuffer(names, dtype=np.uint8))
        np.save(new / _ENDS, np.frombuffer(ends, dtype=np.uint64))
        write_atomically(new / _FOLDERS, json.dumps(described), durable=True)
    seconds = time.monotonic() - started
    print(f"unisono: indexed {len(ends):,} files in {len(described):,} folders in {seconds:.1f} s", file=sys.stderr)
    return target


def _walk(root: str, pattern: str) -> Iterator[tuple[str, int, list[str]]]:
    """Yields each folder's relative path, modification time and sorted file names, in a fixed order of the folders."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        path = os.path.join(root, folder)
        stamp = os.stat(path).st_mtime_ns
        files, folders = [], []
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(os.path.join(folder, entry.name))
                elif fnmatch.fnmatchcase(entry.name, pattern) and entry.is_file():
                    files.append(entry.name)
        yield folder, stamp, sorted(files)
        waiting.extend(sorted(folders, reverse=True))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:20]
