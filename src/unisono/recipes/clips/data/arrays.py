"""Stores the arrays of one video in a folder that appears only when it is complete.

Each array is a .npy file and grows block by block while the video is read; `facts.json` lists shapes and types.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from unisono.atomic_files import sync_folder, temporary_name
from unisono.errors import UserError

FACTS = "facts.json"

_HEADER = 256  # bytes reserved for the header, which is written last, when the array's length is known
_DTYPES = ("uint8", "float16", "float32")


class ArrayFolder:
    """The arrays of one video on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def facts(self) -> dict[str, Any] | None:
        """Reads facts.json; returns None if the folder does not exist, is incomplete or is damaged."""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            stored = json.loads((self._path / FACTS).read_bytes())
            arrays = {}
            for name, (shape, dtype) in stored["arrays"].items():
                size = _HEADER + math.prod(shape) * np.dtype(_DTYPES[_DTYPES.index(dtype)]).itemsize
                if not name.isidentifier() or (self._path / f"{name}.npy").stat().st_size != size:
                    return None
                arrays[name] = tuple(int(side) for side in shape)
            return {
                "arrays": arrays,
                "num_clips": {shape[0] for shape in arrays.values()}.pop(),
                "duration": float(stored["duration"]),
                "has_sound": bool(stored["has_sound"]),
                "remark": str(stored["remark"]),
            }
        return None

    @contextmanager
    def writing(self) -> Iterator[NewArrays]:
        """Yields arrays in a temporary folder, which `commit` renames to this folder; removes it without a commit."""
        partial = temporary_name(self._path)
        try:
            partial.mkdir(parents=True)
            with ExitStack() as files:
                yield NewArrays(partial, self._path, files)
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be written ({error.strerror or error}); free some space, or use another folder"
            ) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)


class NewArrays:
    """The arrays of one video while they are being written."""

    def __init__(self, partial: Path, final: Path, files: ExitStack) -> None:
        self._partial, self._final, self._files = partial, final, files
        self._open: dict[str, BinaryIO] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}

    def add(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Appends rows to each array."""
        for name, new in rows.items():
            if name not in self._open:
                self._open[name] = self._files.enter_context((self._partial / f"{name}.npy").open("xb"))
                self._open[name].write(bytes(_HEADER))
                self._shapes[name], self._dtypes[name] = (0, *new.shape[1:]), new.dtype.name
            length, *rest = self._shapes[name]
            if (tuple(rest), self._dtypes[name]) != (new.shape[1:], new.dtype.name):
                raise ValueError(f"{name}: rows of {new.shape[1:]} {new.dtype} after {rest} {self._dtypes[name]}")
            self._open[name].write(np.ascontiguousarray(new).data)
            self._shapes[name] = (length + len(new), *rest)

    def commit(self, **facts: Any) -> None:
        """Completes the files and renames the folder to its final name."""
        for name, file in self._open.items():
            file.seek(0)
            file.write(_npy_header(self._shapes[name], np.dtype(self._dtypes[name])))
            file.flush()
            os.fsync(file.fileno())
        stored = {"arrays": {name: [self._shapes[name], self._dtypes[name]] for name in self._open}, **facts}
        with (self._partial / FACTS).open("xb") as file:
            file.write(json.dumps(stored).encode())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._partial)
        if ArrayFolder(self._final).facts() is not None:  # another process has written the folder meanwhile
            return
        if self._final.exists():  # a damaged folder from an earlier run
            damaged = self._partial.with_suffix(".damaged.part")
            os.rename(self._final, damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        os.rename(self._partial, self._final)
        sync_folder(self._final.parent)


def _npy_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    # In version 1.0 of the format, the header is a Python literal, padded with spaces.
    literal = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little") + literal.ljust(_HEADER - 11).encode() + b"\n"
