"""Loader workers: processes that prefetch a rank's chunks, and are replaced if they die.

torch's DataLoader cannot be used here. Its workers share one queue with locks. If the system kills a worker in the
middle of a message, or while it holds a lock, the training process waits forever, both in `next` and when it shuts
down. And torch's SIGCHLD handler raises at an arbitrary line of the training process. Here each worker has its own pipe
and reads every n-th chunk. The training process notices the death of a worker when it needs that worker's next chunk,
and starts a new worker with that chunk, so no sample is lost or read twice.

To limit prefetching, the training process sends each worker the number of further chunks that it may read.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import queue
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, islice
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from multiprocessing.sharedctypes import RawValue
from pickle import PicklingError
from typing import Any

import torch
import torch.multiprocessing  # makes multiprocessing send tensors through shared memory
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.pin_memory import pin_memory

from unisono.cluster.lifetime import start_loader_worker
from unisono.data.cursor import Chunk, Cursor
from unisono.data.reading import ChunkReader, ReadChunk, Stopped
from unisono.data.stream import StreamReader
from unisono.errors import RecipeError, TrainingFailed, UnisonoError

_MAX_DEATHS = 3  # number of consecutive worker deaths at the same chunk after which the run ends
_ANNOUNCED = 256  # number of samples that a worker announces to the dataset ahead of reading them
_GRACE_S = 1.0  # seconds for a worker to finish its current sample when the loader closes
_HINTS: dict[int | None, str] = {
    -signal.SIGKILL: " (by the system, if memory ran out)",
    -signal.SIGBUS: " (shared memory may be full: /dev/shm)",
}


class _WorkerDied(Exception):
    """A worker ended before it sent its next chunk."""


class Workers:
    """Reads the chunks of a cursor in `num_workers` processes."""

    def __init__(
        self,
        reader: ChunkReader | StreamReader,
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
        # Create the folder of the workers' sockets in this process, which removes it at exit. A killed worker could
        # not.
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
        """Returns the data of `chunk`, which must be the next chunk of the cursor."""
        turn = self._taken % self._num_workers
        result = self._wait_for(turn, chunk)
        self._workers[turn].delivered(self._prefetch)
        self._taken += 1
        self._taken_of_step = 0 if chunk.last else self._taken_of_step + 1
        if isinstance(result, ExceptionWrapper):
            result.reraise()  # type: ignore[no-untyped-call]
        if isinstance(result, UnisonoError):
            raise result
        return result  # type: ignore[no-any-return]

    def close(self) -> None:
        """Ends all workers, including dead and hanging ones."""
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
            f"{text}; {_MAX_DEATHS} workers in a row have died while they read samples {samples}; check these samples "
            "and the machine's memory, or read without workers (--num_workers 0)"
        )

    def _replace(self, turn: int, chunk: Chunk) -> None:
        """Replaces a dead worker with a new one that starts at `chunk`."""
        self._workers[turn].end(time.monotonic())
        if self._pinning is not None:
            self._pinning.join()  # the thread has ended because the worker died
        self._workers[turn].release()
        cursor = replace(self._cursor, start=min(chunk.global_batch))
        # The new worker does not prefetch at first. If it dies too, this chunk is the cause and not a later one.
        self._workers[turn] = _Worker(turn, self._num_workers, self._reader, cursor, self._taken_of_step, ahead=1)
        if self._pinning is not None:
            self._pinning = _Pinning(self._workers, turn)


class _Worker:
    """Represents one worker process in the training process."""

    def __init__(
        self, number: int, num_workers: int, reader: ChunkReader | StreamReader, cursor: Cursor, first: int, ahead: int
    ) -> None:
        self._number, self._ahead = number, ahead
        self._pipe, worker_end = multiprocessing.Pipe()
        # Use shared memory without locks, because a killed worker might not have released its lock.
        self._stop, self._now = RawValue("b", 0), RawValue("q", -1)
        self._process = multiprocessing.Process(
            target=_work,
            args=(number, num_workers, reader, cursor, first, worker_end, self._stop, self._now),
            name=f"unisono loader worker {number}",
            daemon=True,
        )
        self._index = reader.index
        try:
            self._process.start()
        except (TypeError, AttributeError, PicklingError) as error:
            self._pipe.close()
            raise RecipeError(
                f"the dataset or collate() cannot be sent to a loader worker ({error}); use --num_workers 0, or create "
                "objects that cannot be pickled in the first call of Dataset[i]"
            ) from error
        finally:
            worker_end.close()  # now only the worker has this end open, so its death closes the pipe
        self._allow(ahead)

    def receive(self) -> Any:
        """Waits for the worker's next result and returns it; raises _WorkerDied if the worker dies first."""
        # The pipe closes when the worker dies, unless a process that the worker started still has it open.
        while not self._pipe.poll(1.0):
            if not self._process.is_alive() and not self._pipe.poll(0.0):
                raise _WorkerDied(self._describe_death())
        try:
            message = self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise  # raised by a signal handler, not by the pipe
            raise _WorkerDied(self._describe_death()) from error
        try:
            return ForkingPickler.loads(message)
        except (EOFError, OSError, RuntimeError) as error:  # loads() fetches tensors from the worker, which may be dead
            if self._is_alive():
                raise
            raise _WorkerDied(self._describe_death()) from error

    def delivered(self, prefetch: int) -> None:
        """Allows the worker to be `prefetch` chunks ahead. Called when training has received a chunk."""
        self._allow(1 + prefetch - self._ahead)
        self._ahead = prefetch

    def ask_to_end(self) -> None:
        self._stop.value = 1
        self._allow(1)  # wakes the worker up

    def end(self, deadline: float) -> None:
        """Waits for the process to end, and kills it at `deadline`."""
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def release(self) -> None:
        self._pipe.close()

    def _allow(self, chunks: int) -> None:
        with suppress(OSError):  # the death of a worker is noticed when its next chunk is needed
            self._pipe.send_bytes(str(chunks).encode())

    def _is_alive(self) -> bool:
        """Whether a worker whose pipe has failed is still alive a moment later."""
        self._process.join(1.0)
        time.sleep(0.02)  # another thread that polls child processes may still be recording the end of the worker
        return self._process.is_alive()

    def _describe_death(self) -> str:
        if self._is_alive():  # the worker has closed its pipe and cannot send anything more
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
            text += f" while it was reading sample {self._index(position)} (position {position})"
        return text + _HINTS.get(code, "")


class _Pinning:
    """A thread that receives the workers' results and copies them to page-locked memory, ahead of training."""

    def __init__(self, workers: list[_Worker], turn: int) -> None:
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        device = torch.accelerator.current_device_index()
        # This thread never starts a worker, because workers die with the thread that started them
        # (cluster/lifetime.py).
        turns = (workers[number % len(workers)] for number in count(turn))
        self._thread = threading.Thread(target=self._run, args=(turns, device), name="unisono pinning", daemon=True)
        self._thread.start()

    def receive(self) -> Any:
        result = self._arrived.get()
        if isinstance(result, _Ended):
            self._arrived.put(result)  # for further calls
            raise result.error(result.text)
        return result

    def join(self) -> None:
        self._thread.join()

    def _run(self, turns: Iterator[_Worker], device: int) -> None:
        try:
            torch.set_num_threads(1)  # affects only this thread, whose copies must not compete with training for cores
            torch.accelerator.set_device_index(device)
            for worker in turns:
                self._arrived.put(_pinned(worker.receive()))
        except _WorkerDied as died:
            self._arrived.put(_Ended(_WorkerDied, str(died)))
        except BaseException:
            self._arrived.put(_Ended(RuntimeError, f"in the pinning thread:\n{traceback.format_exc()}"))


@dataclass(frozen=True)
class _Ended:
    """The reason why a thread ended. The exception itself would keep a batch and a dead worker in memory."""

    error: type[Exception]
    text: str


def _pinned(result: Any) -> Any:
    if not isinstance(result, ReadChunk):
        return result  # an error
    return result._replace(data=pin_memory(result.data))  # type: ignore[no-untyped-call]


def _work(
    number: int,
    num_workers: int,
    reader: ChunkReader | StreamReader,
    cursor: Cursor,
    first: int,
    pipe: Connection,
    stop: Any,
    now: Any,
) -> None:
    """Runs in the worker process. Reads every `num_workers`-th chunk from number `first` on, once it is allowed to."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the rank's own handler would only set a flag
    start_loader_worker(number)
    torch.set_num_threads(1)
    seed = reader.order.seed + number
    torch_worker._worker_info = torch_worker.WorkerInfo(  # the result of torch.utils.data.get_worker_info()
        id=number, num_workers=num_workers, seed=seed, dataset=reader.dataset
    )
    reader.now, reader.stop = now, stop
    finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Send results in a thread, so that a full pipe does not keep the worker from reading the next chunk.
    threading.Thread(target=_send, args=(pipe, finished), daemon=True).start()
    allowed = 0
    try:
        for chunk in _announced(islice(_until_error(cursor.chunks()), first, None, num_workers), reader):
            while not allowed:
                allowed += int(pipe.recv_bytes())
            finished.put(_packed(reader, chunk, f"in loader worker {number}"))
            allowed -= 1
        while not reader.stop.value:  # stays alive, because training may not have fetched all tensors yet
            pipe.recv_bytes()
    except (EOFError, OSError, Stopped):
        return  # the rank has closed the pipe, or is about to


def _until_error(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """Yields the chunks up to the first error, which the dataset's `shape` may raise because it is user code."""
    # The rank computes the same chunks and reports the error when it reaches that chunk.
    with suppress(Exception):
        yield from chunks


def _announced(chunks: Iterator[Chunk], reader: ChunkReader | StreamReader) -> Iterator[Chunk]:
    """Yields the chunks; announces each of them to the dataset some samples before it is read."""
    ahead: deque[Chunk] = deque()
    num_samples = 0
    for chunk in chunks:
        reader.announce(chunk)
        ahead.append(chunk)
        num_samples += len(chunk.positions)
        while num_samples > _ANNOUNCED and len(ahead) > 1:
            num_samples -= len(ahead[0].positions)
            yield ahead.popleft()
    yield from ahead


def _packed(reader: ChunkReader | StreamReader, chunk: Chunk, where: str) -> Any:
    """Reads a chunk and pickles the result. Pickling it while sending would lose errors."""
    try:
        return ForkingPickler.dumps(reader(chunk))
    except UnisonoError as error:
        failure: Any = error
    except Exception:
        failure = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]
    try:
        return ForkingPickler.dumps(failure)
    except Exception:  # an exception that cannot be pickled
        text = failure.exc_msg if isinstance(failure, ExceptionWrapper) else str(failure)
        return ForkingPickler.dumps(RecipeError(f"{where}: {text}"))


def _send(pipe: Connection, finished: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            pipe.send_bytes(finished.get())
    except OSError:
        return  # the rank has closed the pipe
