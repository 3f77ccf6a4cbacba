"""Maps ids to row numbers for many millions of rows, in 12 bytes per row instead of a dictionary of strings.

An id, or a text that serves as its own id, is stored as a 64-bit hash. With 10 million rows, the probability of any
collision is 1 in 400,000. The hash is the same in every process.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


class Hashes:
    """A growing array of hashes."""

    def __init__(self) -> None:
        self._hashes = array("Q")

    def add(self, text: str) -> None:
        """Appends the hash of a text."""
        self._hashes.append(hash_of(text))

    def __len__(self) -> int:
        return len(self._hashes)

    def array(self) -> NDArray[np.uint64]:
        """Returns all hashes [n]."""
        return np.frombuffer(self._hashes, dtype=np.uint64) if len(self._hashes) else np.zeros(0, np.uint64)


class Ids:
    """Maps ids to row numbers; a row that repeats an earlier id gets no number."""

    def __init__(self, hashes: NDArray[np.uint64]) -> None:
        order = np.argsort(hashes, kind="stable")
        again = np.zeros(len(hashes), bool)
        again[1:] = hashes[order][1:] == hashes[order][:-1]
        self.first: NDArray[np.bool_] = np.zeros(len(hashes), bool)
        """Mask [n]: False for a row that repeats an earlier id."""
        self.first[order] = ~again
        number = np.cumsum(self.first) - 1
        self._sorted = hashes[order][~again]
        self._numbers = number[order][~again].astype(np.int32)

    def __len__(self) -> int:
        return len(self._sorted)

    def find(self, hashes: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Returns the row numbers of ids, given by their hashes; -1 for unknown ids."""
        if not len(self._sorted):
            return np.full(len(hashes), -1, np.int32)
        place = np.minimum(np.searchsorted(self._sorted, hashes), len(self._sorted) - 1)
        return np.where(self._sorted[place] == hashes, self._numbers[place], np.int32(-1)).astype(np.int32)

    def numbers(self, ids: Sequence[str]) -> NDArray[np.int32]:
        """Returns the row numbers of ids; -1 for unknown ids."""
        return self.find(hashes_of(ids))


def hash_of(text: str) -> int:
    """Returns a 64-bit hash of a text."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def hashes_of(texts: Iterable[str]) -> NDArray[np.uint64]:
    """Returns the hashes [n] of texts."""
    hashes = Hashes()
    for text in texts:
        hashes.add(text)
    return hashes.array()
