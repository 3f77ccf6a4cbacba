"""Reads tensors of a safetensors file by their byte ranges, without mapping the file into memory.

`safetensors.safe_open` maps the whole file, which fails if the file is larger than the memory that a process may
address. This module reads and checks the header, and then reads each tensor, or some of its rows, on demand.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.plain_files import NotRegular, open_regular, parse_json

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
    """The file is not a complete safetensors file; the message says what is wrong with it."""


@dataclass(frozen=True)
class Entry:
    """The entry of one tensor in the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # offset of the tensor's bytes in the file
    num_bytes: int


class TensorFile:
    """The tensors of one safetensors file, read on demand. Several threads or processes may use it."""

    def __init__(self, path: str | Path) -> None:
        """Reads and checks the header; raises BadTensorFile or OSError if that fails."""
        self.path = Path(path)
        with self._open() as file:
            info = os.fstat(file.fileno())
            header, begin = _read_header(file.fileno(), info.st_size)
        self._size, self._identity = info.st_size, _identity(info)
        self.metadata = _metadata(header.pop("__metadata__", {}))
        self.entries = {name: _entry(name, fields, begin) for name, fields in header.items()}
        _check_ranges(self.entries, begin, info.st_size)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to send to other ranks, without the inode number, which may differ between machines."""
        return vars(self) | {"_identity": None}

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor."""
        dtype = _DTYPES.get(self.entries[name].dtype)
        if dtype is None:
            raise BadTensorFile(f"{name!r} has dtype {self.entries[name].dtype}, which unisono cannot read")
        return dtype

    def tensor(self, name: str, file: FileIO | None = None) -> Tensor:
        """Reads a whole tensor. To read several tensors faster, pass the result of `open` as `file`."""
        entry = self.entries[name]
        return self._read(name, entry.shape, entry.start, file)

    def rows(self, name: str, start: int, stop: int, file: FileIO | None = None) -> Tensor:
        """Reads the rows start..stop-1 of a tensor's first dimension, and nothing else."""
        entry = self.entries[name]
        if not entry.shape:
            raise BadTensorFile(f"{name!r} is a scalar and has no rows")
        start, stop, _ = slice(start, stop).indices(entry.shape[0])
        row = math.prod(entry.shape[1:]) * self.dtype(name).itemsize
        return self._read(name, (max(0, stop - start), *entry.shape[1:]), entry.start + start * row, file)

    def open(self) -> FileIO:
        """Opens the file to read several tensors; raises BadTensorFile if it changed since its header was read."""
        file = self._open()
        info = os.fstat(file.fileno())
        is_same = _identity(info) == self._identity if self._identity else info.st_size == self._size
        if not is_same:
            file.close()
            raise BadTensorFile("it was replaced while it was being read")
        return file

    def _read(self, name: str, shape: tuple[int, ...], start: int, file: FileIO | None) -> Tensor:
        if file is None:
            with self.open() as own_file:
                return self._read(name, shape, start, own_file)
        tensor = torch.empty(shape, dtype=self.dtype(name))
        if not tensor.numel():
            return tensor
        target: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        buffer = memoryview(target)
        while buffer:
            count = os.preadv(file.fileno(), [buffer[:_AT_ONCE]], start)
            if count == 0:
                raise BadTensorFile(f"it ends inside {name!r}")
            buffer, start = buffer[count:], start + count
        return tensor

    def _open(self) -> FileIO:
        # Do not keep the file open, because a checkpoint has one file per rank and a process may open only about
        # 1,000.
        try:
            return open_regular(self.path)
        except NotRegular as error:
            raise BadTensorFile(error.strerror) from None


def _identity(info: os.stat_result) -> tuple[int, ...]:
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def _read_header(handle: int, size: int) -> tuple[dict[str, Any], int]:
    """Returns the header of a file of `size` bytes, and the offset at which the tensors' bytes begin."""
    length = int.from_bytes(os.pread(handle, 8, 0), "little")
    if size < 8 or length > min(_LARGEST_HEADER, size - 8):
        raise BadTensorFile("its header is larger than the file or than the format allows")
    try:
        header = parse_json(os.pread(handle, length, 8))
    except ValueError as error:
        raise BadTensorFile(f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise BadTensorFile("its header is not an object")
    return header, 8 + length


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise BadTensorFile("the __metadata__ of its header is not a mapping of strings")
    return value


def _entry(name: str, fields: Any, begin: int) -> Entry:
    if not isinstance(fields, dict) or not isinstance(fields.get("dtype"), str):
        raise BadTensorFile(f"its header lacks the dtype of {name!r}")
    shape, offsets = _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if shape is None or math.prod(shape) >= _LARGEST_SIZE:
        raise BadTensorFile(f"its header lacks a valid shape of {name!r}")
    if offsets is None or len(offsets) != 2:
        raise BadTensorFile(f"its header lacks valid data_offsets of {name!r}")
    dtype = _DTYPES.get(fields["dtype"])
    num_bytes = offsets[1] - offsets[0]
    if num_bytes < 0 or (dtype is not None and num_bytes != math.prod(shape) * dtype.itemsize):
        raise BadTensorFile(f"the data_offsets of {name!r} do not match its shape and dtype")
    return Entry(fields["dtype"], tuple(shape), begin + offsets[0], num_bytes)


def _sizes(value: Any) -> list[int] | None:
    is_list = isinstance(value, list) and all(type(number) is int and 0 <= number < _LARGEST_SIZE for number in value)
    return value if is_list else None


def _check_ranges(entries: dict[str, Entry], begin: int, size: int) -> None:
    """Raises BadTensorFile if the tensors leave a gap, overlap, or do not fill the file of `size` bytes."""
    end = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if entry.start != end:
            raise BadTensorFile(f"the data_offsets of {name!r} leave a gap or overlap with another tensor's")
        end += entry.num_bytes
    if end != size:
        raise BadTensorFile(f"its header describes {end} bytes, but the file has {size}")
