"""Table files whose rows are read in groups: the row groups of Parquet, the record batches of Arrow.

The index contains the number of rows of each group. Reading a row reads its whole group, and the most recently
used groups stay in memory. A full shuffle is therefore slow, because it reads a group for every row;
`--shuffle_window` reads the rows of a group together.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from io import RawIOBase
from typing import Any, ClassVar

import numpy as np
from torch.utils.data import Dataset

from unisono.datasets.index import Array, Kind, open_index
from unisono.datasets.patterns import expand
from unisono.datasets.sources import RangeReader, Source, examine
from unisono.errors import UnisonoError, UserError

_OPEN_FILES = 16  # maximum number of open files per process


class RowGroups(Dataset[Any]):
    """The rows of several files, as dicts of values by column."""

    suffix: ClassVar[str]
    kind: ClassVar[str]

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        index_dir: str | os.PathLike[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        memory_bytes: int = 512 * 2**20,
    ) -> None:
        """`files` are paths, patterns, folders or URLs. Groups of up to `memory_bytes` stay in memory per process."""
        require_pyarrow()
        options = storage_options or {}
        self.files = examine(expand(files, self.suffix, **options), **options)
        self.columns, self.transform, self.memory_bytes = (
            columns if columns is None else list(columns),
            transform,
            memory_bytes,
        )
        self._reader = RangeReader(options)
        self._index = open_index(index_dir, Kind(self.kind, "int64", 2, "groups of rows", self._scan), self.files)
        self._begin()

    def _begin(self) -> None:
        self._sizes_of_groups: Array = np.array(self._index.rows[:, 0])
        self._ends: Array = np.cumsum(self._sizes_of_groups)
        if not len(self):
            raise UserError(f"{self.files[0].name}: these files contain no rows")
        self._groups: OrderedDict[int, Any] = OrderedDict()
        self._files: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no row {index}; the dataset has {len(self)} rows")
        group = int(np.searchsorted(self._ends, index, side="right"))
        table = self._group(group)
        within = index - (int(self._ends[group - 1]) if group else 0)
        [row] = table.slice(within, 1).to_pylist()
        return row if self.transform is None else self.transform(row)

    @property
    def block_starts(self) -> Array:
        """The first row of each group: `--shuffle_window` reads the rows of a group together."""
        starts: Array = (self._ends - self._sizes_of_groups)[self._sizes_of_groups > 0]
        return starts

    def _group(self, number: int) -> Any:
        with self._lock:
            if number not in self._groups:
                self._groups[number] = self._checked(number)
                while len(self._groups) > 1 and sum(each.nbytes for each in self._groups.values()) > self.memory_bytes:
                    self._groups.popitem(last=False)
            self._groups.move_to_end(number)
            return self._groups[number]

    def _checked(self, number: int) -> Any:
        """Reads a group."""
        file, (expected, place) = self._index.locate(number)
        source = self.files[file]
        try:
            if source.url not in self._files:
                self._files[source.url] = self._opened(source)
                while len(self._files) > _OPEN_FILES:
                    self._files.popitem(last=False)
            table = self._read(self._files[source.url], int(place))
        except UnisonoError:
            raise
        except Exception as error:  # pyarrow raises many exception types
            raise UserError(f"{source.name}: rows cannot be read ({_in_one_line(error)})") from error
        if table.num_rows != expected:
            raise UserError(f"{source.name} has changed: expected {expected} rows, got {table.num_rows}")
        return table

    def _scan(self, source: Source) -> Array:
        try:
            return np.array(self._sizes(self._opened(source)), dtype=np.int64).reshape(-1, 2)
        except UnisonoError:
            raise
        except Exception as error:
            raise UserError(f"{source.name} cannot be used ({_in_one_line(error)})") from error

    def _opened(self, source: Source) -> Any:
        """Opens a file for reading its groups."""
        raise NotImplementedError

    def _sizes(self, opened: Any) -> list[tuple[int, int]]:
        """Returns the number of rows and the location of each group of a file."""
        raise NotImplementedError

    def _read(self, opened: Any, place: int) -> Any:
        """Reads a group of a file as a table."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_ends", "_sizes_of_groups", "_groups", "_files", "_lock")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


class RangeFile(RawIOBase):
    """A file object for pyarrow that reads byte ranges with a RangeReader."""

    def __init__(self, reader: RangeReader, source: Source) -> None:
        self._reader, self._source, self._at = reader, source, 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns the offset of the next read."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to an offset and returns it."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._source.size}[whence]
        self._at = start + offset
        return self._at

    def read(self, count: int | None = -1) -> bytes:
        """Reads up to `count` bytes from the current offset; by default, reads to the end."""
        left = max(0, self._source.size - self._at)
        data = self._reader.read(self._source, self._at, left if count is None or count < 0 else min(count, left))
        self._at += len(data)
        return data

    def size(self) -> int:
        """Returns the size of the file in bytes."""
        return self._source.size


def require_pyarrow() -> None:
    """Raises UserError if pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise UserError("Parquet and Arrow files need pyarrow; run: pip install 'unisono[data]'") from error


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
