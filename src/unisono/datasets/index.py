"""The index of a dataset: an array on disk with one row per sample, grouped by file.

The first process that needs an index builds it, while the others wait for a lock. The rows of each file are saved as
soon as the file has been scanned, so a build that was killed continues where it stopped. A complete index appears
atomically and never changes: its name depends on the sizes and stamps of all files. If a file changes, a new index is
built, which reuses the rows of the unchanged files.

Rows are read from disk when they are needed. Therefore the memory of a process does not grow with the index, and an
index that was removed or truncated raises an error instead of the SIGBUS that a memory map would cause.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from unisono.atomic_files import atomic_file, atomic_folder, temporary_name, write_atomically
from unisono.datasets.locks import locked
from unisono.datasets.sources import Source
from unisono.errors import UserError
from unisono.formatting import format_count
from unisono.plain_files import open_regular, parse_json

Array = np.ndarray[Any, Any]

_ROWS, _COUNTS, _SOURCES = "rows.npy", "counts.npy", "sources.json"
_THREADS = 8  # number of threads that scan files
_REPORT_S = 30.0  # seconds between two messages about a long build


@dataclass(frozen=True)
class Kind:
    """What an index contains."""

    name: str  # includes a version, which changes with the format
    dtype: str  # dtype of a row
    columns: int
    unit: str  # plural noun for the rows, used in messages
    scan: Callable[[Source], Array]  # reads a file and returns its rows


class Index:
    """An index that is read row by row; small when pickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._load()

    def _load(self) -> None:
        counts: Array = np.load(self.folder / _COUNTS, allow_pickle=False)
        self.ends: Array = np.cumsum(counts)
        """The number of rows up to and including each file."""
        rows: Any = self.rows
        if (
            counts.dtype != np.int64
            or counts.ndim != 1
            or rows.ndim != 2
            or len(self) != len(rows)
            or (counts < 0).any()
        ):
            raise ValueError("the arrays of the index are inconsistent")
        self.dtype, self.columns, self._begin = rows.dtype, rows.shape[1], rows.offset
        self._file = open_regular(self.folder / _ROWS)

    @property
    def rows(self) -> Array:
        """Returns all rows as a memory map; only rows that a process reads take memory."""
        rows: Array = np.load(self.folder / _ROWS, mmap_mode="r", allow_pickle=False)
        return rows

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def starts(self) -> Array:
        """The first row of each file that has rows, in ascending order."""
        starts = self.ends - np.diff(self.ends, prepend=0)
        unique: Array = np.unique(starts[starts < self.ends])
        return unique

    def locate(self, index: int) -> tuple[int, Array]:
        """Returns the number of the file that contains a row, and the row."""
        if not 0 <= index < len(self):
            raise IndexError(f"there is no sample {index}; the dataset has {len(self)} samples")
        width = self.dtype.itemsize * self.columns
        data = os.pread(self._file.fileno(), width, self._begin + index * width)
        if len(data) != width:
            raise UserError(f"the index in {self.folder} was truncated while it was in use; start the run again")
        return int(np.searchsorted(self.ends, index, side="right")), np.frombuffer(data, self.dtype)

    def of_file(self, number: int) -> Array:
        """Returns the rows of a file."""
        end = int(self.ends[number])
        return self.rows[int(self.ends[number - 1]) if number else 0 : end]

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.folder = state["folder"]
        self._load()


def default_folder() -> Path:
    """Returns the folder of the indexes if the user chooses none."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unisono" / "datasets"


def open_index(folder: str | os.PathLike[str] | None, kind: Kind, sources: Sequence[Source]) -> Index:
    """Opens the index of these files; builds it if it is missing. Several processes may call this at once."""
    root = Path(folder).expanduser().absolute() if folder is not None else default_folder()
    parents = sorted({os.path.dirname(source.name) for source in sources})
    family = root / f"{kind.name}-{_digest(parents)}"
    current = family / _digest([[source.name, source.size, source.stamp] for source in sources])
    try:
        if (index := _opened(current, kind)) is not None:
            return index
        family.mkdir(parents=True, exist_ok=True)
        with locked(family / ".lock"):
            index = _opened(current, kind)
            return index if index is not None else _built(family, current, kind, sources)
    except OSError as error:
        name = f" ({error.filename})" if error.filename else ""
        raise UserError(
            f"the index of the dataset cannot be written to {root}: {error.strerror}{name}; pass another index_dir"
        ) from error


def _opened(folder: Path, kind: Kind) -> Index | None:
    """Returns the index in a folder; None if it is missing or damaged."""
    try:
        index = Index(folder)
    except Exception:  # numpy raises many exception types for damaged files
        return None
    return index if index.dtype == np.dtype(kind.dtype) and index.columns == kind.columns else None


def _built(family: Path, current: Path, kind: Kind, sources: Sequence[Source]) -> Index:
    with suppress(OSError):  # move a damaged index out of the way
        shutil.rmtree(current.rename(temporary_name(current)), ignore_errors=True)
    try:
        _build(family, current, kind, sources)
    except OSError:
        # On a file system without locks, another process may have built the same index and removed the partial files.
        if (index := _opened(current, kind)) is not None:
            return index
        raise
    return Index(current)


def _build(family: Path, current: Path, kind: Kind, sources: Sequence[Source]) -> None:
    parts = family / "parts"
    parts.mkdir(exist_ok=True)
    older = _older_rows(family, kind)
    started = reported = time.monotonic()
    missing = [source for source in sources if not (parts / _part(source)).exists() and _key(source) not in older]
    if older and missing:
        _say(f"{format_count(len(missing), 'file')} of {len(sources)} changed or are new: indexing them")
    with ThreadPoolExecutor(_THREADS) as pool:
        jobs = [pool.submit(_scan, source, kind, parts / _part(source)) for source in missing]
        try:
            for number, job in enumerate(jobs):
                job.result()
                if time.monotonic() - reported > _REPORT_S:
                    reported = time.monotonic()
                    _say(f"indexed {number + 1} of {len(missing)} files")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    with atomic_folder(current) as new:
        counts = _join(new / _ROWS, (_part_of(source, parts, older) for source in sources), kind)
        if not any(counts):
            raise UserError(f"{sources[0].name}: no {kind.unit} found in {format_count(len(sources), 'file')}")
        np.save(new / _COUNTS, np.array(counts, dtype=np.int64))
        described = [[source.name, source.size, source.stamp] for source in sources]
        write_atomically(new / _SOURCES, json.dumps(described), durable=True)
    if missing:
        seconds = time.monotonic() - started
        _say(f"indexed {format_count(len(missing), 'file')} in {seconds:.1f} s: {sum(counts):,} {kind.unit}")
    shutil.rmtree(parts, ignore_errors=True)


def _scan(source: Source, kind: Kind, part: Path) -> None:
    rows = kind.scan(source)
    with atomic_file(part) as temporary, open(temporary, "xb") as file:
        np.save(file, rows.astype(kind.dtype).reshape(-1, kind.columns), allow_pickle=False)


def _join(path: Path, arrays: Iterable[Array], kind: Kind) -> list[int]:
    """Writes the concatenated arrays to one file; returns their lengths."""
    counts = []
    with open(path, "xb") as file:
        _write_header(file, 0, kind)
        length = file.tell()
        for array in arrays:
            counts.append(len(array))
            file.write(np.ascontiguousarray(array).data)
        file.seek(0)
        _write_header(file, sum(counts), kind)  # fits in place of the first header, because numpy pads headers
        assert file.tell() == length
        file.flush()
        os.fsync(file.fileno())
    return counts


def _write_header(file: IO[bytes], rows: int, kind: Kind) -> None:
    shape = (rows, kind.columns)
    header = {"descr": np.dtype(kind.dtype).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _part_of(source: Source, parts: Path, older: dict[tuple[str, ...], tuple[Index, int]]) -> Array:
    if _key(source) in older:
        index, number = older[_key(source)]
        return index.of_file(number)
    rows: Array = np.load(parts / _part(source), allow_pickle=False)
    return rows


def _older_rows(family: Path, kind: Kind) -> dict[tuple[str, ...], tuple[Index, int]]:
    """Maps files to the earlier index that contains their rows, and to their number in it."""
    rows: dict[tuple[str, ...], tuple[Index, int]] = {}
    for folder in family.iterdir():
        if folder.name == "parts" or folder.name.startswith(".") or (index := _opened(folder, kind)) is None:
            continue
        with suppress(OSError, ValueError, TypeError):
            with open_regular(folder / _SOURCES) as file:
                described = parse_json(file.read())
            if len(described) == len(index.ends):
                rows |= {tuple(map(str, each)): (index, number) for number, each in enumerate(described)}
    return rows


def _key(source: Source) -> tuple[str, ...]:
    return source.name, str(source.size), source.stamp


def _part(source: Source) -> str:
    return f"{_digest(_key(source))}.npy"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:20]


def _say(text: str) -> None:
    print(f"unisono: {text}", file=sys.stderr, flush=True)
