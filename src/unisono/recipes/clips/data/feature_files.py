"""Features that people computed before: a row for every so many seconds of a video, as .npy, .npz or .h5.

They are somebody's files: nothing in them is run, nothing outside them is read, and each is checked before use.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.common.bad_files import BadMedia

FEATURES = (".npy", ".npz", ".h5", ".hdf5")

_MOST_BYTES = 2**32  # of one video's features, unpacked
_MOST_CHUNK = 2**28  # bytes; a chunk of HDF5 is unpacked whole, however little of it is asked for
_OWN_FILTERS = {1, 2, 3, 32000}  # deflate, shuffle, fletcher32, lzf: those that come with h5py and load no plugin


@dataclass(frozen=True)
class FeatureFile:
    """Where the features of a video are: a file, the group in it (of HDF5), and the seconds that a row stands for."""

    path: Path
    group: str = ""
    seconds: float | None = None
    """None: a row is a clip."""

    def rows(self) -> NDArray[Any]:
        """[N, D] the features as they are in the file; BadMedia where they cannot be used."""
        read = {".npy": _npy, ".npz": _npz}.get(self.path.suffix.lower(), self._h5)
        try:
            rows = read(self.path)
        except (OSError, ValueError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile) as error:
            told = " ".join(str(error).split())[:200]
            raise BadMedia(self.path, f"cannot be read as features ({told})") from None
        if rows.ndim != 2 or 0 in rows.shape or rows.dtype.kind not in "fiu":
            raise BadMedia(
                self.path, f"has features of shape {rows.shape} and type {rows.dtype}; expected T × D numbers"
            )
        return rows

    def clips(self, clip_seconds: float) -> NDArray[np.float32]:
        """[T, D] the features of each clip: the mean of its rows, each as much as it overlaps."""
        rows = self.rows()
        clips = np.asarray(rows if self.seconds is None else _averaged(rows, self.seconds, clip_seconds), np.float32)
        if not np.isfinite(clips).all():
            raise BadMedia(self.path, "has features that are not finite numbers")
        return clips

    def _h5(self, path: Path) -> NDArray[Any]:
        with opened_h5(path) as file:
            place = child(path, file, self.group) if self.group else file
            names = list(place)
            name = "features" if "features" in names else names[0] if len(names) == 1 else None
            if name is None:
                raise BadMedia(path, f"holds {', '.join(map(repr, names[:3])) or 'nothing'}; expected 'features'")
            return table(path, place, name)


@contextmanager
def opened_h5(path: Path) -> Iterator[Any]:
    """An HDF5 file, to be read; BadMedia where it is none, or is damaged."""
    import h5py  # type: ignore[import-untyped]

    if not path.is_file():
        raise BadMedia(path, "there is no such file")
    try:
        # Without a lock where there is none to be had: finished files do not change.
        with h5py.File(path, "r", locking="best-effort") as file:
            yield file
    except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:  # h5py has no exception of its own
        raise BadMedia(path, f"cannot be read as HDF5 ({' '.join(str(error).split())[:200]})") from None


def child(path: Path, group: Any, name: str) -> Any:
    """What is in a group under a name. A link may lead out of the file, so it is looked at and not followed."""
    import h5py

    if not isinstance(group, h5py.Group) or not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise BadMedia(path, f"has no {name!r} where it was expected, or it lies in another file")
    return group[name]


def table(path: Path, group: Any, name: str) -> NDArray[Any]:
    """The numbers in a group under a name."""
    import h5py

    found = child(path, group, name)
    if not isinstance(found, h5py.Dataset) or found.dtype.kind not in "fiu":
        raise BadMedia(path, f"{name!r} is not a table of numbers")
    if found.is_virtual or found.external:
        raise BadMedia(path, f"{name!r} lies in other files; such files are not read")
    made = found.id.get_create_plist()
    if not {made.get_filter(index)[0] for index in range(made.get_nfilters())} <= _OWN_FILTERS:
        raise BadMedia(path, f"{name!r} is packed in a way that needs a plugin; repack it with gzip")
    chunk = math.prod(found.chunks or (0,)) * found.dtype.itemsize
    if chunk > _MOST_CHUNK or found.size * found.dtype.itemsize > _MOST_BYTES:
        raise BadMedia(path, f"{name!r} of shape {found.shape} is larger than features of a video are")
    return np.asarray(found[()])


def _npy(path: Path) -> NDArray[Any]:
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _npz(path: Path) -> NDArray[Any]:
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > _MOST_BYTES:
            raise BadMedia(path, f"unpacks to more than {_MOST_BYTES:,} bytes")
    with np.load(path, allow_pickle=False) as arrays:
        name = "features" if "features" in arrays.files else arrays.files[0] if len(arrays.files) == 1 else None
        if name is None:
            raise BadMedia(path, f"holds {', '.join(map(repr, arrays.files[:3])) or 'nothing'}; expected 'features'")
        return np.asarray(arrays[name])


def _averaged(rows: NDArray[Any], seconds: float, clip_seconds: float) -> NDArray[np.float64]:
    """[T, D] the mean over each clip of rows that stand for other spans."""
    end = len(rows) * seconds
    edges = np.arange(math.ceil(end / clip_seconds - 1e-6) + 1) * clip_seconds
    edges = np.minimum(edges, end)
    # Summed up to each edge; between two rows the sum grows evenly.
    summed = np.concatenate([np.zeros((1, rows.shape[1])), np.cumsum(rows, axis=0, dtype=np.float64)])
    place = edges / seconds
    low = np.minimum(place.astype(np.int64), len(rows) - 1)
    at_edges = summed[low] + (place - low)[:, None] * (summed[low + 1] - summed[low])
    return np.asarray(np.diff(at_edges, axis=0) / np.diff(place)[:, None])
