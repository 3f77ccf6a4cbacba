"""The index of a dataset: for each of its files an array with one row per sample, joined in one file.

An index is built once, by the first process that needs it, while the others wait for its lock. The arrays of finished
files are stored at once, so a killed build continues. A complete index appears at once and never changes: its name
contains the sizes and stamps of all files, so a file that changes leads to another index, which takes over the rows of
the files that have not changed.

A row is read from the file when it is needed. So the memory of a process does not grow with the index, and an index
that was removed or truncated is an error instead of the SIGBUS that a memory map would cause.
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
_THREADS = 8  # that read files to index
_REPORT_S = 30.0  # seconds between two messages about a long build


@dataclass(frozen=True)
class Kind:
    """What an index contains."""

    name: str  # with a version: a change of the format changes the name
    dtype: str  # of a row
    columns: int
    unit: str  # what a row stands for, for messages
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
            raise ValueError("the arrays of the index do not fit each other")
        self.dtype, self.columns, self._begin = rows.dtype, rows.shape[1], rows.offset
        self._file = open_regular(self.folder / _ROWS)

    @property
    def rows(self) -> Array:
        """All rows, memory-mapped: whoever reads many of them has them in memory."""
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
        """Returns the number of the file to which a row belongs, and the row."""
        if not 0 <= index < len(self):
            raise IndexError(f"there is no sample {index}; the dataset has {len(self)} samples")
        width = self.dtype.itemsize * self.columns
        data = os.pread(self._file.fileno(), width, self._begin + index * width)
        if len(data) != width:
            raise UserError(f"the index in {self.folder} was truncated while it was in use; start the run again")
        return int(np.searchsorted(self.ends, index, side="right")), np.frombuffer(data, self.dtype)

    def of_file(self, number: int) -> Array:
        """The rows of a file."""
        end = int(self.ends[number])
        return self.rows[int(self.ends[number - 1]) if number else 0 : end]

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.folder = state["folder"]
        self._load()


def default_folder() -> Path:
    """Where indexes are stored if the user names no folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unisono" / "datasets"


def open_index(folder: str | os.PathLike[str] | None, kind: Kind, sources: Sequence[Source]) -> Index:
    """Opens the index of these files, and builds it first if there is none. Several processes may call it at once."""
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
    """The index in a folder; None if there is none, or if it is damaged."""
    try:
        index = Index(folder)
    except Exception:  # numpy raises many kinds for damaged files
        return None
    return index if index.dtype == np.dtype(kind.dtype) and index.columns == kind.columns else None


def _built(family: Path, current: Path, kind: Kind, sources: Sequence[Source]) -> Index:
    with suppress(OSError):  # a damaged index
        shutil.rmtree(current.rename(temporary_name(current)), ignore_errors=True)
    try:
        _build(family, current, kind, sources)
    except OSError:
        # On a file system without locks, another process may have built the same index, and removed its parts.
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
            raise UserError(f"{sources[0].name}: there are no {kind.unit} in {format_count(len(sources), 'file')}")
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
    """Writes the arrays one after another as one array; returns their lengths."""
    counts = []
    with open(path, "xb") as file:
        _write_header(file, 0, kind)
        length = file.tell()
        for array in arrays:
            counts.append(len(array))
            file.write(np.ascontiguousarray(array).data)
        file.seek(0)
        _write_header(file, sum(counts), kind)  # numpy leaves room in it for a larger number
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
    """The files whose rows an earlier index contains."""
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
