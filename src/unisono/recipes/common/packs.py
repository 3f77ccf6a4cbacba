"""A cache of many tensors in few files.

A pack is a safetensors file with up to a few hundred tensors, each stored under its cache key. Packs are written
atomically and never change, so a killed process loses only a few seconds of work. One file per sample would be simpler,
but many file systems are slow with millions of small files, and each file would need its own fsync.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from unisono.recipes.common.cache_files import remove_leftovers, write_cache_file

_MAX_TENSORS = 256  # maximum number of tensors per pack, which limits the size of the header
_MAX_BYTES = 2**26
_MAX_SECONDS = 15.0  # maximum number of seconds between writes; limits the work lost if the process is killed
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64, "I64": torch.int64}


class PackEntry(NamedTuple):
    """The location of a tensor in a pack, its shape and its dtype."""

    pack: str
    start: int  # offset in the file, in bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


class Packs:
    """A folder of packs."""

    def __init__(self, folder: Path, fits: Callable[[PackEntry], bool] = lambda entry: True) -> None:
        """Entries for which `fits` returns False are ignored, because another program may have written them."""
        self.folder, self._fits = folder, fits

    def find(self) -> dict[str, PackEntry]:
        """Returns all entries by key. Damaged and truncated packs are ignored."""
        entries: dict[str, PackEntry] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            entries.update(self.entries(path))
        return entries

    def entries(self, path: Path) -> dict[str, PackEntry]:
        """Returns the entries of one pack by key; empty if the pack is missing, damaged or truncated."""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {key: entry for key, entry in _entries(path) if self._fits(entry)}
        return {}

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Writes a new pack."""
        name = hashlib.sha256("\n".join(tensors).encode()).hexdigest()[:32]
        write_cache_file(self.folder / f"{name}.safetensors", save(tensors))


class Packing:
    """Collects tensors and writes them as a pack when it is full or a few seconds have passed."""

    def __init__(self, packs: Packs) -> None:
        self._packs, self._tensors = packs, dict[str, Tensor]()
        self._bytes, self._since = 0, 0.0

    def __enter__(self) -> Packing:
        remove_leftovers(self._packs.folder)
        return self

    def __exit__(self, *_: object) -> None:
        self.write()  # writes even after an exception, because these tensors are complete

    def add(self, key: str, tensor: Tensor) -> None:
        """Adds a tensor."""
        if not self._tensors:
            self._since = time.monotonic()
        self._tensors[key] = tensor.detach().cpu().contiguous()
        self._bytes += tensor.numel() * tensor.element_size()
        late = time.monotonic() - self._since > _MAX_SECONDS
        if late or len(self._tensors) >= _MAX_TENSORS or self._bytes >= _MAX_BYTES:
            self.write()

    def write(self) -> None:
        """Writes the collected tensors."""
        if self._tensors:
            self._packs.write(self._tensors)
        self._tensors, self._bytes = {}, 0


class PackReader:
    """Reads tensors from packs by index. A million entries take little memory, even in loader workers."""

    def __init__(self, folder: Path, entries: Sequence[PackEntry]) -> None:
        # Uses arrays, because updating the reference counts of a million objects would copy them into forked workers.
        self._folder = str(folder)
        self._packs = sorted({entry.pack for entry in entries})
        self._kinds = list(dict.fromkeys((entry.shape, entry.dtype) for entry in entries))
        pack, kind = ({value: number for number, value in enumerate(column)} for column in (self._packs, self._kinds))
        self._start = np.array([entry.start for entry in entries], dtype=np.int64)
        self._pack = np.array([pack[entry.pack] for entry in entries], dtype=np.int32)
        self._kind = np.array([kind[entry.shape, entry.dtype] for entry in entries], dtype=np.int32)

    def __getitem__(self, index: int) -> Tensor:
        shape, dtype = self._kinds[self._kind[index]]
        size, path = math.prod(shape) * dtype.itemsize, os.path.join(self._folder, self._packs[self._pack[index]])
        # Opens the file for each read: this takes microseconds, and forked workers must not share a file handle.
        with open(path, "rb", buffering=0) as file:
            content = bytearray(os.pread(file.fileno(), size, int(self._start[index])))
        if len(content) < size:
            raise OSError(f"{path} was truncated while in use; start the run again to recreate it")
        return torch.frombuffer(content, dtype=dtype).view(shape)


def _entries(path: Path) -> Iterator[tuple[str, PackEntry]]:
    """Parses the header of a pack; raises ValueError if the file does not match its header."""
    # Does not use the safetensors library, which does not expose offsets, so every read would parse the header again.
    if not path.is_file():  # opening a FIFO would block forever
        raise ValueError(f"{path} is not a file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, size)))
    begin, end = 8 + length, 8 + length
    entries = []
    for key, description in header.items():
        if key == "__metadata__":
            continue
        (first, last), shape = description["data_offsets"], tuple(description["shape"])
        dtype = _DTYPES[description["dtype"]]
        if first < 0 or not all(type(side) is int and side > 0 for side in shape):
            raise ValueError(f"{path}: {key} has an invalid offset or shape")
        if last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{path}: the size of {key} does not match its shape")
        entries.append((key, PackEntry(path.name, begin + first, shape, dtype)))
        end = max(end, begin + last)
    if end != size:
        raise ValueError(f"{path} is truncated")
    return iter(entries)
