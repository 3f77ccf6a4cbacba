"""Reads HDF5 files of learning histories from untrusted sources."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.errors import UserError
from unisono.recipes.darkroom.rooms import Room

FORMAT = 1
_MAX_CHUNK = 2**28  # maximum chunk size in bytes, because HDF5 decompresses whole chunks
_MAX_TEXT = 2000  # maximum number of characters in an attribute
_BUILT_IN_FILTERS = {1, 2, 3, 32000}  # deflate, shuffle, fletcher32 and lzf, for which h5py needs no plugin


@dataclass(frozen=True)
class Origin:
    """Everything that determines the content of a history file; unisono stores it in the file's attributes."""

    room: str
    size: int
    horizon: int
    source: str
    settings: str  # settings of the source, as JSON
    seed: int
    num_streams: int
    num_steps: int

    @classmethod
    def of(
        cls, room: Room, source: str, settings: Mapping[str, Any] | None, seed: int, num_streams: int, num_steps: int
    ) -> Origin:
        """Returns the origin of `num_streams` histories per task with `num_steps` steps each."""
        as_json = json.dumps(dict(settings or {}), sort_keys=True)
        return cls(room.name, room.size, room.horizon, source, as_json, seed, num_streams, num_steps)

    def difference(self, other: Origin) -> str:
        """Describes the first field that differs from the other origin; empty if all fields are equal."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name} {theirs}, not {mine}"
        return ""


class HistoryFile:
    """A history file, open for reading; nothing in it is trusted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> HistoryFile:
        import h5py  # type: ignore[import-untyped]

        if not self.path.is_file():
            raise UserError(f"{self.path} is not a file; histories are HDF5 files, or folders of them")
        try:
            # Needs no lock, because the file no longer changes, and some file systems do not support locks.
            self._file = h5py.File(self.path, "r", locking="best-effort")
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be read as HDF5 ({error}); the file is truncated or of another kind: move it away"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @contextmanager
    def _damage_as_user_error(self) -> Iterator[None]:
        # HDF5 detects damage only when it reads the damaged part, and h5py has no specific exception for damage.
        try:
            yield
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{self.path} is damaged ({error}); move it away, and collect it again") from None

    def origin(self) -> Origin | None:
        """Returns the stored origin; None if another program wrote the file."""
        with self._damage_as_user_error():
            stored = {name: self._attribute(name) for name in ("format", *(field.name for field in fields(Origin)))}
        version = stored.pop("format")
        if version is None:
            return None
        if version != FORMAT or None in stored.values():
            raise UserError(f"{self.path} has format {version}, which this version cannot read; collect it again")
        return Origin(**stored)

    def tasks(self) -> set[str]:
        """Returns the names of all groups."""
        with self._damage_as_user_error():
            return set(self._file)

    def has(self, task: int) -> bool:
        """Whether the file contains histories of this task."""
        import h5py

        with self._damage_as_user_error():
            # Does not follow other kinds of links, because they may point outside the file.
            return isinstance(self._file.get(str(task), getlink=True), h5py.HardLink)

    def read(self, task: int, name: str, num_streams: int, num_steps: int, below: int, *width: int) -> Tensor:
        """Reads a column's first steps as bytes, [streams, steps, *width]; its values must be in [0, below)."""
        with self._damage_as_user_error():
            column = self._dataset(task, name)
            shape = column.shape
            if column.dtype.kind not in "iub":
                raise self._unfit(task, name, f"has type {column.dtype}, expected integers")
            if len(shape) != 2 + len(width) or shape[2:] != width:
                expected = ", ".join(["steps", "streams", *map(str, width)])
                raise self._unfit(task, name, f"has the shape {shape}, expected ({expected})")
            if shape[0] < num_steps or shape[1] < num_streams:
                sizes = f"{shape[0]} steps of {shape[1]} streams, expected at least {num_steps} of {num_streams}"
                raise self._unfit(task, name, f"has {sizes}; train on fewer steps or streams, or collect more")
            values = column[:num_steps, :num_streams]
        if values.size and not 0 <= values.min() <= values.max() < below:
            raise self._unfit(
                task, name, f"has values from {values.min()} to {values.max()}, expected 0 to {below - 1}"
            )
        return torch.from_numpy(values.astype(np.uint8)).transpose(0, 1)

    def _dataset(self, task: int, name: str) -> Any:
        import h5py

        group = self._file[str(task)]
        if not isinstance(group, h5py.Group) or not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise self._unfit(task, name, "is missing")
        column = group[name]
        if not isinstance(column, h5py.Dataset):
            raise self._unfit(task, name, "is not a dataset")
        if column.is_virtual or column.external:
            raise self._unfit(task, name, "refers to other files, which is not supported")
        properties = column.id.get_create_plist()
        if not {properties.get_filter(index)[0] for index in range(properties.get_nfilters())} <= _BUILT_IN_FILTERS:
            raise self._unfit(task, name, "is compressed with a plugin; repack it with gzip")
        if column.chunks and math.prod(column.chunks) * column.dtype.itemsize > _MAX_CHUNK:
            raise self._unfit(task, name, f"has chunks of {column.chunks}; repack it in chunks below 256 MiB")
        return column

    def _unfit(self, task: int, name: str, problem: str) -> UserError:
        return UserError(f"{self.path}: {name} of task {task} {problem}")

    def _attribute(self, name: str) -> Any:
        attributes = self._file.attrs
        if name not in attributes:
            return None
        attribute = attributes.get_id(name)
        # Rejects variable-length text, which is stored elsewhere in the file: HDF5 may search a damaged file forever.
        if attribute.shape != () or attribute.dtype.kind not in "iuS":
            return None
        value = attributes[name]
        if not isinstance(value, bytes):
            return int(value)
        text = value.decode()
        return text if text.isprintable() and len(text) <= _MAX_TEXT else None  # error messages may contain this text
