"""Reads announced samples ahead: the operating system reads from local files, and threads read from servers.

In a shuffled order, consecutive samples are not adjacent in a file. The operating system therefore does not read ahead
on its own, and each request to a server would have to wait for the previous request. Samples are announced in the order
in which they will be read. At most `_MOST_BYTES` are read ahead, to limit memory use.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

_MOST_BYTES = 32 * 2**20  # per process
_THREADS = 16  # number of threads that read from servers


class ReadAhead:
    """The announced samples of one process. A copy in another process starts without samples."""

    def __init__(self, begin: Callable[[int], int], forget: Callable[[int], object]) -> None:
        """`begin(index)` starts to read a sample and returns its size in bytes; `forget(index)` drops the sample."""
        self._begin, self._forget = begin, forget
        self._clear()

    def _clear(self) -> None:
        self._waiting: deque[int] = deque()
        self._ahead: deque[tuple[int, int]] = deque()  # index and size in bytes of each sample that is read ahead
        self._bytes = self._misses = 0
        self._owner = os.getpid()

    def announce(self, indices: Iterable[int]) -> None:
        """Announces further samples."""
        if self._owner != os.getpid():  # in a forked process
            self._clear()
        self._waiting.extend(indices)
        self._fill()

    def is_read(self, index: int) -> None:
        """Called after a sample was read; drops this sample and the samples announced before it."""
        if any(index == ahead for ahead, _ in self._ahead):
            done, self._misses = -1, 0
            while done != index:
                done, size = self._ahead.popleft()
                self._bytes -= size
                self._forget(done)
            self._fill()
            return
        if self._waiting and self._waiting[0] == index:
            self._waiting.popleft()
        self._misses += 1
        # A loader that has ended may have announced samples that it never read.
        if self._ahead and self._misses > len(self._ahead) + len(self._waiting):
            for done, _ in self._ahead:
                self._forget(done)
            self._clear()

    def _fill(self) -> None:
        while self._waiting and (self._bytes < _MOST_BYTES or not self._ahead):
            index = self._waiting.popleft()
            size = self._begin(index)
            self._ahead.append((index, size))
            self._bytes += size

    def __getstate__(self) -> dict[str, Any]:
        return {"_begin": self._begin, "_forget": self._forget}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_begin"], state["_forget"])  # type: ignore[misc]


class Fetcher:
    """Reads samples in threads of this process. A copy in another process starts without samples."""

    def __init__(self) -> None:
        self._results: dict[int, Future[bytes]] = {}
        self._jobs: queue.SimpleQueue[tuple[Future[bytes], Callable[[], bytes]]] | None = None
        self._owner = os.getpid()

    def begin(self, index: int, read: Callable[[], bytes]) -> None:
        """Begins to read a sample."""
        if self._owner != os.getpid():  # threads do not survive a fork
            self.__init__()  # type: ignore[misc]
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            for _ in range(_THREADS):
                threading.Thread(target=_work, args=(self._jobs,), name="unisono samples", daemon=True).start()
        if index not in self._results:
            self._results[index] = Future()
            self._jobs.put((self._results[index], read))

    def take(self, index: int) -> bytes | None:
        """Waits for a sample and returns its content; None if the caller has to read it, as after a failure."""
        if self._owner != os.getpid() or (result := self._results.pop(index, None)) is None:
            return None
        with suppress(Exception):  # reading it again reports the error
            return result.result()
        return None

    def forget(self, index: int) -> None:
        """Drops a sample that is not needed any more."""
        if (result := self._results.pop(index, None)) is not None:
            result.cancel()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]


def _work(jobs: queue.SimpleQueue[tuple[Future[bytes], Callable[[], bytes]]]) -> None:
    while True:
        result, read = jobs.get()
        if not result.set_running_or_notify_cancel():
            continue
        try:
            result.set_result(read())
        except BaseException as error:
            result.set_exception(error)
        del result, read  # otherwise this thread would keep the content in memory until the next job
