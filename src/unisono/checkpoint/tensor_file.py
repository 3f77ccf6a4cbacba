"""Reads tensors from a safetensors file by their byte ranges, without mapping the file into memory.

`safetensors.safe_open` maps the whole file, which fails for a file larger than the memory that a process may address.
Here the header is read and checked first; then each tensor, or some of its rows, is read into memory of its own.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LARGEST_HEADER = 100_000_000  # the limit of the format
_LARGEST_SIZE = 2**63
_AT_ONCE = 2**30  # bytes per read; Linux reads at most 2 GiB


class BadTensorFile(Exception):
    """A file that is not a whole safetensors file; the message says what is wrong with it."""


@dataclass(frozen=True)
class Entry:
    """What the header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # where its bytes start in the file
    num_bytes: int


class TensorFile:
    """The tensors of one safetensors file; each is read when it is asked for, also by several threads or processes."""

    def __init__(self, path: str | Path) -> None:
        """Reads and checks the header; BadTensorFile or OSError if there is something wrong with the file."""
        self.path = Path(path)
        with self._open() as handle:
            info = self._info = os.fstat(handle)
            header, begin = _read_header(handle, info.st_size)
        self.metadata = _metadata(header.pop("__metadata__", {}))
        self.entries = {name: _entry(name, told, begin) for name, told in header.items()}
        _check_ranges(self.entries, begin, info.st_size)

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor's numbers."""
        dtype = _DTYPES.get(self.entries[name].dtype)
        if dtype is None:
            raise BadTensorFile(f"{name!r} has the type {self.entries[name].dtype}, which cannot be read")
        return dtype

    def tensor(self, name: str) -> Tensor:
        """A tensor, whole."""
        entry = self.entries[name]
        return self._read(name, entry.shape, entry.start)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a tensor's first dimension; only these are read."""
        entry = self.entries[name]
        if not entry.shape:
            raise BadTensorFile(f"{name!r} has no rows: it is a single number")
        start, stop, _ = slice(start, stop).indices(entry.shape[0])
        row = math.prod(entry.shape[1:]) * self.dtype(name).itemsize
        return self._read(name, (max(0, stop - start), *entry.shape[1:]), entry.start + start * row)

    def _read(self, name: str, shape: tuple[int, ...], start: int) -> Tensor:
        tensor = torch.empty(shape, dtype=self.dtype(name))
        if not tensor.numel():
            return tensor
        bytes_of_it: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        room = memoryview(bytes_of_it)
        with self._open() as handle:
            if _identity(os.fstat(handle)) != _identity(self._info):
                raise BadTensorFile("it was replaced while it was being read")
            while room:
                count = os.preadv(handle, [room[:_AT_ONCE]], start)
                if count == 0:
                    raise BadTensorFile(f"it ends inside {name!r}")
                room, start = room[count:], start + count
        return tensor

    @contextmanager
    def _open(self) -> Iterator[int]:
        # For each read: a checkpoint has as many files as it had ranks, and a process may open a thousand or so.
        handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would be waited for
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise BadTensorFile("it is not a plain file")
            yield handle
        finally:
            os.close(handle)


def _identity(info: os.stat_result) -> tuple[int, ...]:
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def _read_header(handle: int, size: int) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors' bytes begin."""
    length = int.from_bytes(os.pread(handle, 8, 0), "little")
    if size < 8 or length > min(_LARGEST_HEADER, size - 8):
        raise BadTensorFile("its header is larger than the file, or than the format allows")
    try:
        header = json.loads(os.pread(handle, length, 8))
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadTensorFile(f"its header is not JSON ({what})") from None
    if not isinstance(header, dict):
        raise BadTensorFile("its header is not an object")
    return header, 8 + length


def _metadata(told: Any) -> dict[str, str]:
    if not isinstance(told, dict) or not all(isinstance(value, str) for value in told.values()):
        raise BadTensorFile("the metadata in its header are not texts by name")
    return told


def _entry(name: str, told: Any, begin: int) -> Entry:
    if not isinstance(told, dict) or not isinstance(told.get("dtype"), str):
        raise BadTensorFile(f"its header does not say which type {name!r} has")
    shape, offsets = _sizes(told.get("shape")), _sizes(told.get("data_offsets"))
    if shape is None or math.prod(shape) >= _LARGEST_SIZE:
        raise BadTensorFile(f"its header does not say which shape {name!r} has")
    if offsets is None or len(offsets) != 2:
        raise BadTensorFile(f"its header does not say where {name!r} is (data_offsets)")
    dtype = _DTYPES.get(told["dtype"])
    num_bytes = offsets[1] - offsets[0]
    if num_bytes < 0 or (dtype is not None and num_bytes != math.prod(shape) * dtype.itemsize):
        raise BadTensorFile(f"the data_offsets of {name!r} do not fit its shape and type")
    return Entry(told["dtype"], tuple(shape), begin + offsets[0], num_bytes)


def _sizes(value: Any) -> list[int] | None:
    is_list = isinstance(value, list) and all(type(number) is int and 0 <= number < _LARGEST_SIZE for number in value)
    return value if is_list else None


def _check_ranges(entries: dict[str, Entry], begin: int, size: int) -> None:
    """The tensors lie one after the other and fill the file: otherwise two would share bytes, or some would be lost."""
    end = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if entry.start != end:
            raise BadTensorFile(f"the data_offsets of {name!r} leave a gap or overlap with another tensor's")
        end += entry.num_bytes
    if end != size:
        raise BadTensorFile(f"its header describes {end} bytes, the file has {size}")
