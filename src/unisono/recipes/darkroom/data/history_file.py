"""A file of histories, as it is found on somebody's disk: opened, questioned, and read with care."""

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
_MAX_CHUNK = 2**28  # bytes; a chunk is unpacked whole, however little of it is asked for
_LONGEST = 2000  # characters of what a file says of itself
_OWN_FILTERS = {1, 2, 3, 32000}  # deflate, shuffle, fletcher32, lzf: those that come with h5py and load no plugin


@dataclass(frozen=True)
class Origin:
    """Where histories come from: all that decides what is in them. A file of ours says it in its attributes."""

    room: str
    size: int
    horizon: int
    source: str
    settings: str  # of the source, as JSON
    seed: int
    num_streams: int
    num_steps: int

    @classmethod
    def of(
        cls, room: Room, source: str, settings: Mapping[str, Any] | None, seed: int, num_streams: int, num_steps: int
    ) -> Origin:
        """Histories of `num_streams` learners per task, `num_steps` steps each."""
        told = json.dumps(dict(settings or {}), sort_keys=True)
        return cls(room.name, room.size, room.horizon, source, told, seed, num_streams, num_steps)

    def difference(self, other: Origin) -> str:
        """The first thing in which the other one differs, in words, or nothing."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name} {theirs}, not {mine}"
        return ""


class HistoryFile:
    """A file of histories, opened to be read. It is somebody's: nothing in it is trusted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> HistoryFile:
        import h5py  # type: ignore[import-untyped]

        if not self.path.is_file():
            raise UserError(f"{self.path}: there is no such file; histories are HDF5 files, or folders of them")
        try:
            # Without a lock where there is none to be had: finished files do not change.
            self._file = h5py.File(self.path, "r", locking="best-effort")
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be read as HDF5 ({error}); it is something else, or was cut short; move it away"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @contextmanager
    def _faults(self) -> Iterator[None]:
        # HDF5 finds damage only when it comes to it, and h5py has no exception of its own for it.
        try:
            yield
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{self.path} is damaged ({error}); move it away, and collect its histories again"
            ) from None

    def origin(self) -> Origin | None:
        """What the file says of itself; None if it is not one of ours."""
        with self._faults():
            told = {name: self._attribute(name) for name in ("format", *(field.name for field in fields(Origin)))}
        version = told.pop("format")
        if version is None:
            return None
        if version != FORMAT or None in told.values():
            raise UserError(f"{self.path} has format {version}, which this version cannot read; collect it again")
        return Origin(**told)

    def tasks(self) -> set[str]:
        """The names of all groups."""
        with self._faults():
            return set(self._file)

    def has(self, task: int) -> bool:
        """Whether there are histories of this task."""
        import h5py

        with self._faults():
            # A link may lead out of the file, so it is looked at and not followed.
            return isinstance(self._file.get(str(task), getlink=True), h5py.HardLink)

    def read(self, task: int, name: str, num_streams: int, num_steps: int, below: int, *width: int) -> Tensor:
        """[streams, steps, *width] the beginning of a column: whole numbers from 0 to below - 1, as bytes."""
        with self._faults():
            column = self._dataset(task, name)
            shape = column.shape
            if column.dtype.kind not in "iub":
                raise self._unfit(task, name, f"has numbers of type {column.dtype}, expected whole numbers")
            if len(shape) != 2 + len(width) or shape[2:] != width:
                expected = ", ".join(["steps", "streams", *map(str, width)])
                raise self._unfit(task, name, f"has the shape {shape}, expected ({expected})")
            if shape[0] < num_steps or shape[1] < num_streams:
                has, wants = f"{shape[0]} steps of {shape[1]} streams", f"{num_steps} of {num_streams}"
                raise self._unfit(task, name, f"has {has}, and {wants} were asked for; ask for less, or collect more")
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
            raise self._unfit(task, name, "is not a table of numbers")
        if column.is_virtual or column.external:
            raise self._unfit(task, name, "lies in other files; such files are not read")
        made = column.id.get_create_plist()
        if not {made.get_filter(index)[0] for index in range(made.get_nfilters())} <= _OWN_FILTERS:
            raise self._unfit(task, name, "is packed in a way that needs a plugin; repack it with gzip")
        if column.chunks and math.prod(column.chunks) * column.dtype.itemsize > _MAX_CHUNK:
            raise self._unfit(task, name, f"has chunks of {column.chunks}; repack it in chunks below 256 MiB")
        return column

    def _unfit(self, task: int, name: str, what: str) -> UserError:
        return UserError(f"{self.path}: {name} of task {task} {what}")

    def _attribute(self, name: str) -> Any:
        attributes = self._file.attrs
        if name not in attributes:
            return None
        kept = attributes.get_id(name)
        # Text of any length lies elsewhere in the file, and in a damaged one HDF5 looks for it for ever.
        if kept.shape != () or kept.dtype.kind not in "iuS":
            return None
        value = attributes[name]
        if not isinstance(value, bytes):
            return int(value)
        text = value.decode()
        return text if text.isprintable() and len(text) <= _LONGEST else None  # it may be shown to the user
