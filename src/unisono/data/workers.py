"""Loader workers that may die: processes that read a rank's chunks ahead of training.

Why not torch's DataLoader: its workers share one queue and its locks. A worker that the system kills in the middle of
a message, or while it holds a lock, leaves the training process waiting for ever, in `next` as well as in shutting
down; and torch's handler of SIGCHLD raises in whatever line of python the training process is just at. Here each
worker has a line of its own and reads every n-th chunk, so its death is noticed exactly where its next chunk is waited
for, and a new worker begins with that chunk: no sample is lost, none is read twice.

A worker may be ahead of training by a number of chunks: messages to it say how many more it may read.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from multiprocessing.sharedctypes import RawValue
from pickle import PicklingError
from typing import Any

import torch
import torch.multiprocessing  # teaches multiprocessing to hand over tensors in shared memory
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.pin_memory import pin_memory

from unisono.cluster.lifetime import start_loader_worker
from unisono.data.cursor import Chunk, Cursor
from unisono.data.reading import ChunkReader, ReadChunk, Stopped
from unisono.errors import RecipeError, TrainingFailed, UnisonoError

_MAX_DEATHS = 3  # in a row, for the same chunk
_GRACE_S = 1.0  # for a worker to finish the sample it is reading when the loader closes
_HINTS: dict[int | None, str] = {
    -signal.SIGKILL: " (the system does that when memory runs out)",
    -signal.SIGBUS: " (shared memory may be full: /dev/shm)",
}


class _WorkerDied(Exception):
    """A worker ended before it had handed over its next chunk."""


class Workers:
    """The chunks of a cursor, read by `num_workers` processes."""

    def __init__(
        self,
        reader: ChunkReader,
        cursor: Cursor,
        num_workers: int,
        prefetch: int,
        pin: bool,
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        self._reader, self._cursor, self._num_workers, self._prefetch = reader, cursor, num_workers, prefetch
        self._on_death = on_death
        self._taken, self._taken_of_step = 0, 0
        self._workers: list[_Worker] = []
        self._pinning: _Pinning | None = None
        # Workers keep their sockets in the folder of the process that made one first: that ends in order, they may not.
        multiprocessing.util.get_temp_dir()
        try:
            for number in range(num_workers):
                self._workers.append(_Worker(number, num_workers, reader, cursor, number, ahead=prefetch))
        except BaseException:
            self.close()
            raise
        if pin:
            self._pinning = _Pinning(self._workers, 0)

    def take(self, chunk: Chunk) -> ReadChunk:
        """The data of `chunk`, which is the next one of the cursor."""
        turn = self._taken % self._num_workers
        found = self._wait_for(turn, chunk)
        self._workers[turn].delivered(self._prefetch)
        self._taken += 1
        self._taken_of_step = 0 if chunk.last else self._taken_of_step + 1
        if isinstance(found, ExceptionWrapper):
            found.reraise()  # type: ignore[no-untyped-call]
        if isinstance(found, UnisonoError):
            raise found
        return found  # type: ignore[no-any-return]

    def close(self) -> None:
        """Ends the workers, also those that are dead or hang."""
        for worker in self._workers:
            worker.ask_to_end()
        deadline = time.monotonic() + _GRACE_S
        for worker in self._workers:
            worker.end(deadline)
        if self._pinning is not None:
            self._pinning.join()
        for worker in self._workers:
            worker.release()
        self._workers.clear()

    def _wait_for(self, turn: int, chunk: Chunk) -> Any:
        for death in range(1, _MAX_DEATHS + 1):
            try:
                if self._pinning is not None:
                    return self._pinning.receive()
                return self._workers[turn].receive()
            except _WorkerDied as died:
                text = str(died)
            if death < _MAX_DEATHS:
                if self._on_death is not None:
                    self._on_death(text)
                self._replace(turn, chunk)
        samples = ", ".join(str(self._reader.index(position)) for position in chunk.positions[:32])
        raise TrainingFailed(
            f"{text}; that was death number {_MAX_DEATHS} in a row with samples {samples} to read: "
            "look at these samples and at the machine's memory; --num_workers 0 reads without workers"
        )

    def _replace(self, turn: int, chunk: Chunk) -> None:
        """A new worker in place of a dead one, from `chunk` on."""
        self._workers[turn].end(time.monotonic())
        if self._pinning is not None:
            self._pinning.join()  # it ended with the worker
        self._workers[turn].release()
        cursor = replace(self._cursor, start=min(chunk.global_batch))
        # Not ahead of training at first: when it dies again, it dies of this chunk and not of one after it.
        self._workers[turn] = _Worker(turn, self._num_workers, self._reader, cursor, self._taken_of_step, ahead=1)
        if self._pinning is not None:
            self._pinning = _Pinning(self._workers, turn)


class _Worker:
    """One worker process, seen from the training process."""

    def __init__(
        self, number: int, num_workers: int, reader: ChunkReader, cursor: Cursor, first: int, ahead: int
    ) -> None:
        self._number, self._ahead = number, ahead
        self._line, theirs = multiprocessing.Pipe()
        # Plain shared memory without locks, which a killed worker could take with it.
        self._stop, self._now = RawValue("b", 0), RawValue("q", -1)
        self._process = multiprocessing.Process(
            target=_work,
            args=(number, num_workers, reader, cursor, first, theirs, self._stop, self._now),
            name=f"unisono loader worker {number}",
            daemon=True,
        )
        self._index = reader.index
        try:
            self._process.start()
        except (TypeError, AttributeError, PicklingError) as error:
            self._line.close()
            raise RecipeError(
                f"the data set or collate() cannot be handed to a loader worker ({error}); use --num_workers 0, "
                "or build what cannot be pickled in the first Dataset[i]"
            ) from error
        finally:
            theirs.close()  # now only the worker holds it: when it dies, its line ends
        self._allow(ahead)

    def receive(self) -> Any:
        """What the worker has read next."""
        # The line ends at once when a worker dies, unless a process that the worker started still holds it.
        while not self._line.poll(1.0):
            if not self._process.is_alive() and not self._line.poll(0.0):
                raise _WorkerDied(self._epitaph())
        try:
            message = self._line.recv_bytes()
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise  # not of the line: a signal handler's
            raise _WorkerDied(self._epitaph()) from error
        try:
            return ForkingPickler.loads(message)
        except (EOFError, OSError, RuntimeError) as error:  # tensors are fetched from the worker, if it still lives
            if self._lives():
                raise
            raise _WorkerDied(self._epitaph()) from error

    def delivered(self, prefetch: int) -> None:
        """Training has a chunk of this worker: it may go on, and be `prefetch` chunks ahead from now on."""
        self._allow(1 + prefetch - self._ahead)
        self._ahead = prefetch

    def ask_to_end(self) -> None:
        self._stop.value = 1
        self._allow(1)  # in case it waits

    def end(self, deadline: float) -> None:
        """Returns when the process is gone: by itself until `deadline`, killed then."""
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def release(self) -> None:
        self._line.close()

    def _allow(self, chunks: int) -> None:
        with suppress(OSError):  # a dead one is noticed when its next chunk is waited for
            self._line.send_bytes(str(chunks).encode())

    def _lives(self) -> bool:
        """Whether a worker that has failed us still lives a moment later."""
        self._process.join(1.0)
        time.sleep(0.02)  # another thread, which looks after its own processes, may be just noting down the end of this
        return self._process.is_alive()

    def _epitaph(self) -> str:
        if self._lives():  # it has closed its line: nothing will ever come from it
            self._process.kill()
            self._process.join()
        code = self._process.exitcode
        text = f"loader worker {self._number} (pid {self._process.pid})"
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            text += f" was killed by {name}"
        else:
            text += f" ended with status {code}"
        position = self._now.value
        if position >= 0:
            text += f" while it read sample {self._index(position)} (position {position})"
        return text + _HINTS.get(code, "")


class _Pinning:
    """A thread that receives what workers read and copies it to page-locked memory, ahead of training."""

    def __init__(self, workers: list[_Worker], turn: int) -> None:
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        device = torch.accelerator.current_device_index()
        # It asks for the workers' next chunks in order, but it never starts a worker: workers die with the thread that
        # started them (see cluster/lifetime.py).
        turns = (workers[number % len(workers)] for number in _count_from(turn))
        self._thread = threading.Thread(target=self._run, args=(turns, device), name="unisono pinning", daemon=True)
        self._thread.start()

    def receive(self) -> Any:
        found = self._arrived.get()
        if isinstance(found, _Ended):
            self._arrived.put(found)  # the thread has ended: who asks again gets the same answer
            raise found.error(found.text)
        return found

    def join(self) -> None:
        self._thread.join()

    def _run(self, turns: Iterator[_Worker], device: int) -> None:
        try:
            torch.set_num_threads(1)  # of this thread: copying must not take the cores that training uses
            torch.accelerator.set_device_index(device)
            for worker in turns:
                self._arrived.put(_pinned(worker.receive()))
        except _WorkerDied as died:
            self._arrived.put(_Ended(_WorkerDied, str(died)))
        except BaseException:
            self._arrived.put(_Ended(RuntimeError, f"in the pinning thread:\n{traceback.format_exc()}"))


@dataclass(frozen=True)
class _Ended:
    """Why a thread ended; not the exception itself, whose frames would keep a batch and a dead worker alive."""

    error: type[Exception]
    text: str


def _pinned(found: Any) -> Any:
    if not isinstance(found, ReadChunk):
        return found  # an error
    return found._replace(data=pin_memory(found.data))  # type: ignore[no-untyped-call]


def _count_from(number: int) -> Iterator[int]:
    while True:
        yield number
        number += 1


def _work(
    number: int,
    num_workers: int,
    reader: ChunkReader,
    cursor: Cursor,
    first: int,
    line: Connection,
    stop: Any,
    now: Any,
) -> None:
    """A worker's life: reads every `num_workers`-th chunk from number `first` on, when it is allowed to."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the rank's own handler would only set a flag
    start_loader_worker(number)
    torch.set_num_threads(1)
    seed = reader.order.seed + number
    torch_worker._worker_info = torch_worker.WorkerInfo(  # what torch.utils.data.get_worker_info() answers
        id=number, num_workers=num_workers, seed=seed, dataset=reader.dataset
    )
    reader.now, reader.stop = now, stop
    finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # A full line must not keep the worker from reading the next chunk.
    threading.Thread(target=_send, args=(line, finished), daemon=True).start()
    allowed = 0
    try:
        for chunk in islice(_while_it_goes(cursor.chunks()), first, None, num_workers):
            while not allowed:
                allowed += int(line.recv_bytes())
            finished.put(_packed(reader, chunk, f"in loader worker {number}"))
            allowed -= 1
        while not reader.stop.value:  # the tensors it has sent live here until they are fetched
            line.recv_bytes()
    except (EOFError, OSError, Stopped):
        return  # the rank has closed the line, or is about to


def _while_it_goes(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """The chunks up to the first that fails (the data set's `shape` is the recipe's code)."""
    # The rank works out the same chunks, and says itself what is wrong when it has come as far.
    with suppress(Exception):
        yield from chunks


def _packed(reader: ChunkReader, chunk: Chunk, where: str) -> Any:
    """What came of a chunk, as bytes; packed here rather than while sending, where an error would go unheard."""
    try:
        return ForkingPickler.dumps(reader(chunk))
    except UnisonoError as error:
        found: Any = error
    except Exception:
        found = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]
    try:
        return ForkingPickler.dumps(found)
    except Exception:  # an exception class that cannot be sent
        text = found.exc_msg if isinstance(found, ExceptionWrapper) else str(found)
        return ForkingPickler.dumps(RecipeError(f"{where}: {text}"))


def _send(line: Connection, finished: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            line.send_bytes(finished.get())
    except OSError:
        return  # the rank has closed the line
