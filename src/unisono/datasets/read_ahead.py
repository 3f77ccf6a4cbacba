"""Makes the system read announced samples of local files ahead, so that the disk always has several requests.

The samples of a shuffled order are not adjacent, so the system does not read ahead itself. Samples are announced in the
order in which they are read, and at most `_MOST_BYTES` of them are read ahead, because they take memory of the machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

_MOST_BYTES = 32 * 2**20  # for each process


class ReadAhead:
    """The announced samples of one process. Copies of it, such as in a forked worker, begin without any."""

    def __init__(self, advise: Callable[[int], int]) -> None:
        """`advise(index)` makes the system read a sample, and returns its bytes."""
        self._advise = advise
        self._waiting: deque[int] = deque()
        self._ahead: deque[tuple[int, int]] = deque()  # samples that the system reads ahead, and their bytes
        self._bytes = 0

    def announce(self, indices: Iterable[int]) -> None:
        """Adds samples that are read after those announced before."""
        self._waiting.extend(indices)
        self._fill()

    def is_read(self, index: int) -> None:
        """Called when a sample is read: it, and those announced before it, need no more memory."""
        if any(index == ahead for ahead, _ in self._ahead):
            done = -1
            while done != index:
                done, size = self._ahead.popleft()
                self._bytes -= size
            self._fill()
        elif self._waiting and self._waiting[0] == index:
            self._waiting.popleft()

    def _fill(self) -> None:
        while self._waiting and (self._bytes < _MOST_BYTES or not self._ahead):
            index = self._waiting.popleft()
            size = self._advise(index)
            self._ahead.append((index, size))
            self._bytes += size

    def __getstate__(self) -> dict[str, Any]:
        return {"_advise": self._advise}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_advise"])  # type: ignore[misc]
