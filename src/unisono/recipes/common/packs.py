"""Many tensors in few files: what the cache writes.

A pack is a safetensors file with up to a few hundred tensors, each under its key. It appears complete or not at all,
and never changes: a killed process loses what it had not packed yet, some seconds of work. One file per sample would
be simpler, but a million small files are more than many file systems like, and each would wait for the disk.
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

from unisono.recipes.common.whole_files import remove_leftovers, write_whole

_MOST_TENSORS = 256  # so that no header is long
_MOST_BYTES = 2**26
_LONGEST_S = 15.0  # of work that a kill may cost
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64, "I64": torch.int64}


class Kept(NamedTuple):
    """Where a tensor lies in which pack, and what it is."""

    pack: str
    start: int  # in bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


class Packs:
    """A folder of packs."""

    def __init__(self, folder: Path, fits: Callable[[Kept], bool] = lambda kept: True) -> None:
        """What does not fit counts as not there: somebody else may have written it."""
        self.folder, self._fits = folder, fits

    def find(self) -> dict[str, Kept]:
        """What is there, by key. A pack that is damaged or cut short counts as not there."""
        found: dict[str, Kept] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            found.update(self.entries(path))
        return found

    def entries(self, path: Path) -> dict[str, Kept]:
        """What is in one pack, by key; nothing, if it is not there, damaged or cut short."""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {key: kept for key, kept in _entries(path) if self._fits(kept)}
        return {}

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Adds a pack."""
        name = hashlib.sha256("\n".join(tensors).encode()).hexdigest()[:32]
        write_whole(self.folder / f"{name}.safetensors", save(tensors))


class Packing:
    """Collects tensors, and writes a pack whenever enough of them, or enough of somebody's time, is in it."""

    def __init__(self, packs: Packs) -> None:
        self._packs, self._tensors = packs, dict[str, Tensor]()
        self._bytes, self._since = 0, 0.0

    def __enter__(self) -> Packing:
        remove_leftovers(self._packs.folder)
        return self

    def __exit__(self, *_: object) -> None:
        self.write()  # whatever happened: what is computed is computed

    def add(self, key: str, tensor: Tensor) -> None:
        """Adds a tensor."""
        if not self._tensors:
            self._since = time.monotonic()
        self._tensors[key] = tensor.detach().cpu().contiguous()
        self._bytes += tensor.numel() * tensor.element_size()
        late = time.monotonic() - self._since > _LONGEST_S
        if late or len(self._tensors) >= _MOST_TENSORS or self._bytes >= _MOST_BYTES:
            self.write()

    def write(self) -> None:
        """Writes what is collected."""
        if self._tensors:
            self._packs.write(self._tensors)
        self._tensors, self._bytes = {}, 0


class Shelf:
    """Tensors of packs by number, for reading; a million of them take little memory, also in loader workers."""

    def __init__(self, folder: Path, kept: Sequence[Kept]) -> None:
        # Arrays, because counting references to a million objects would copy them into every forked worker.
        self._folder = str(folder)
        self._packs = sorted({entry.pack for entry in kept})
        self._kinds = list(dict.fromkeys((entry.shape, entry.dtype) for entry in kept))
        pack, kind = ({it: number for number, it in enumerate(of)} for of in (self._packs, self._kinds))
        self._start = np.array([entry.start for entry in kept], dtype=np.int64)
        self._pack = np.array([pack[entry.pack] for entry in kept], dtype=np.int32)
        self._kind = np.array([kind[entry.shape, entry.dtype] for entry in kept], dtype=np.int32)

    def __getitem__(self, index: int) -> Tensor:
        shape, dtype = self._kinds[self._kind[index]]
        wanted, path = math.prod(shape) * dtype.itemsize, os.path.join(self._folder, self._packs[self._pack[index]])
        # Opened each time: that takes microseconds, and nothing is shared between forked workers.
        with open(path, "rb", buffering=0) as file:
            content = bytearray(os.pread(file.fileno(), wanted, int(self._start[index])))
        if len(content) < wanted:
            raise OSError(f"{path} was cut short while it was in use; start again, and it is computed anew")
        return torch.frombuffer(content, dtype=dtype).view(shape)


def _entries(path: Path) -> Iterator[tuple[str, Kept]]:
    """What the header of a pack lists; ValueError if it is not what the file holds."""
    # Read here, because the library tells no offsets, and without them every read would parse the header again.
    if not path.is_file():  # a pipe would be waited for, for ever
        raise ValueError(f"{path} is not a file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, size)))
    begin, end = 8 + length, 8 + length
    entries = []
    for key, told in header.items():
        if key == "__metadata__":
            continue
        (first, last), shape, dtype = told["data_offsets"], tuple(told["shape"]), _DTYPES[told["dtype"]]
        if first < 0 or not all(type(side) is int and side > 0 for side in shape):
            raise ValueError(f"{path}: {key} is not what the cache keeps")
        if last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{path}: {key} is not as long as its shape")
        entries.append((key, Kept(path.name, begin + first, shape, dtype)))
        end = max(end, begin + last)
    if end != size:
        raise ValueError(f"{path} is cut short")
    return iter(entries)
