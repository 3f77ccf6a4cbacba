"""Reads users' feature files (.npy, .npz or .h5): one row per time interval of a video.

The files are untrusted: nothing in them is executed, links to other files are not followed, and the content is checked.
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

_MOST_BYTES = 2**32  # maximum size of one video's features, uncompressed
_MOST_CHUNK = 2**28  # maximum chunk size in bytes, because HDF5 uncompresses a whole chunk to read any part of it
_BUILT_IN_FILTERS = {1, 2, 3, 32000}  # deflate, shuffle, fletcher32 and lzf, for which h5py needs no plugin


@dataclass(frozen=True)
class FeatureFile:
    """The location of a video's features: a file, and the group in an HDF5 file."""

    path: Path
    group: str = ""
    seconds: float | None = None
    """Number of seconds that a row covers; None: the length of a clip."""

    def rows(self) -> NDArray[Any]:
        """Reads the features [N, D] as stored in the file; raises BadMedia if they cannot be used."""
        read = {".npy": _npy, ".npz": _npz}.get(self.path.suffix.lower(), self._h5)
        try:
            rows = read(self.path)
        except BadMedia:
            raise
        except Exception as error:  # numpy and zipfile raise many exception types for damaged files, such as zlib.error
            message = " ".join(str(error).split())[:200]
            raise BadMedia(self.path, f"cannot be read as features ({message})") from None
        if rows.ndim != 2 or 0 in rows.shape or rows.dtype.kind not in "fiu":
            raise BadMedia(
                self.path, f"has features of shape {rows.shape} and type {rows.dtype}; expected T × D numbers"
            )
        return rows

    def clips(self, clip_seconds: float) -> NDArray[np.float32]:
        """Reads the features [T, D] of each clip: the mean of the rows that overlap it, weighted by the overlap."""
        rows = self.rows()
        clips = np.asarray(rows if self.seconds is None else _averaged(rows, self.seconds, clip_seconds), np.float32)
        if not np.isfinite(clips).all():
            raise BadMedia(self.path, "has features that are not finite numbers")
        return clips

    def _h5(self, path: Path) -> NDArray[Any]:
        with opened_h5(path) as file:
            group = child(path, file, self.group) if self.group else file
            return table(path, group, _features_name(path, list(group)))


@contextmanager
def opened_h5(path: Path) -> Iterator[Any]:
    """Opens an HDF5 file for reading; raises BadMedia if it is damaged or not HDF5."""
    import h5py  # type: ignore[import-untyped]

    if not path.is_file():
        raise BadMedia(path, "there is no such file")
    try:
        # "best-effort": needs no lock, because nothing writes to the file, and some file systems do not support locks.
        with h5py.File(path, "r", locking="best-effort") as file:
            yield file
    except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:  # h5py has no common exception class
        raise BadMedia(path, f"cannot be read as HDF5 ({' '.join(str(error).split())[:200]})") from None


def child(path: Path, group: Any, name: str) -> Any:
    """Returns a member of a group. Follows only hard links, because other links can point to another file."""
    import h5py

    if not isinstance(group, h5py.Group) or not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise BadMedia(path, f"has no {name!r}, or only a link to another file")
    return group[name]


def table(path: Path, group: Any, name: str) -> NDArray[Any]:
    """Reads a numeric dataset of a group."""
    import h5py

    dataset = child(path, group, name)
    if not isinstance(dataset, h5py.Dataset) or dataset.dtype.kind not in "fiu":
        raise BadMedia(path, f"{name!r} is not a dataset of numbers")
    if dataset.is_virtual or dataset.external:
        raise BadMedia(path, f"{name!r} is stored in other files, which are not read")
    properties = dataset.id.get_create_plist()
    if not {properties.get_filter(index)[0] for index in range(properties.get_nfilters())} <= _BUILT_IN_FILTERS:
        raise BadMedia(
            path, f"{name!r} uses an HDF5 compression filter that needs a plugin; write it again with the gzip filter"
        )
    chunk = math.prod(dataset.chunks or (0,)) * dataset.dtype.itemsize
    if chunk > _MOST_CHUNK or dataset.size * dataset.dtype.itemsize > _MOST_BYTES:
        raise BadMedia(path, f"{name!r} of shape {dataset.shape} is too large for the features of one video")
    return np.asarray(dataset[()])


def _npy(path: Path) -> NDArray[Any]:
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _npz(path: Path) -> NDArray[Any]:
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > _MOST_BYTES:
            raise BadMedia(path, f"has more than {_MOST_BYTES:,} bytes when uncompressed")
    with np.load(path, allow_pickle=False) as arrays:
        return np.asarray(arrays[_features_name(path, arrays.files)])


def _features_name(path: Path, names: list[str]) -> str:
    """Returns the name of the array with the features: `features`, or the only name."""
    if "features" not in names and len(names) != 1:
        raise BadMedia(path, f"contains {', '.join(map(repr, names[:3])) or 'nothing'}; expected 'features'")
    return "features" if "features" in names else names[0]


def _averaged(rows: NDArray[Any], seconds: float, clip_seconds: float) -> NDArray[np.float64]:
    """Averages rows that cover `seconds` each over clips: [T, D]."""
    end = len(rows) * seconds
    edges = np.minimum(np.arange(math.ceil(end / clip_seconds - 1e-6) + 1) * clip_seconds, end)
    # Interpolates the cumulative sum of the rows linearly at the edges of the clips.
    summed = np.concatenate([np.zeros((1, rows.shape[1])), np.cumsum(rows, axis=0, dtype=np.float64)])
    position = edges / seconds
    low = np.minimum(position.astype(np.int64), len(rows) - 1)
    at_edges = summed[low] + (position - low)[:, None] * (summed[low + 1] - summed[low])
    return np.asarray(np.diff(at_edges, axis=0) / np.diff(position)[:, None])
