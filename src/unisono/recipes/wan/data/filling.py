"""Computing what a cache lacks: read ahead in threads, compute here, pack, and go on after whatever stopped it."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from unisono.engine.recipe import Work
from unisono.recipes.common.bad_files import BadFiles, BadMedia
from unisono.recipes.common.packs import Packing, Packs

_READERS = 4  # threads that decode while the device encodes; so many samples wait, at most
_SAY_EVERY_S = 10.0

Item = TypeVar("Item")
Finish = Callable[[], Tensor]
"""What is left to do when a sample has been read: on the device, one at a time."""


def fill(
    work: Work, packs: Packs, bad: BadFiles, what: str, items: Mapping[str, Item], read: Callable[[Item], Finish]
) -> None:
    """Computes this process's share of what is not there yet. `read` runs in a thread, what it returns runs here.

    Shared are all items, not only the missing ones: those look different to a process that looks a moment later.
    """
    known = packs.find()
    missing = [key for key in work.share(list(items)) if key not in known]
    progress = _Progress(work, what, len(missing), len(items))
    with Packing(packs) as packing, closing(_read_ahead(missing, items, read)) as ready:
        for done, (key, reading) in enumerate(ready):
            if work.stopping:
                return
            progress.at(done)
            try:
                packing.add(key, reading.result()())
            except BadMedia as error:
                bad.note(key, str(error))
                progress.bad(str(error))


def _read_ahead(
    keys: list[str], items: Mapping[str, Item], read: Callable[[Item], Finish]
) -> Generator[tuple[str, Future[Finish]], None, None]:
    waiting: deque[tuple[str, Future[Finish]]] = deque()
    readers = ThreadPoolExecutor(_READERS)
    try:
        for key in keys:
            waiting.append((key, readers.submit(read, items[key])))
            if len(waiting) > _READERS:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        readers.shutdown(cancel_futures=True)


class _Movable(Protocol):
    def to(self, device: str) -> object: ...


Model = TypeVar("Model", bound=_Movable)


@contextmanager
def borrowed(load: Callable[[], Model], device: str) -> Iterator[Callable[[], Model]]:
    """A model that is loaded when it is asked for the first time, and let go of at the end."""
    held: list[Model] = []

    def get() -> Model:
        if not held:
            held.append(load())
            held[0].to(device)
        return held[0]

    try:
        yield get
    finally:
        held.clear()
        if torch.device(device).type == "cuda":  # the training that follows may need every byte
            gc.collect()  # models of these libraries hold themselves in circles
            torch.cuda.empty_cache()


class _Progress:
    """Says now and then how far it is."""

    def __init__(self, work: Work, what: str, mine: int, total: int) -> None:
        self._work, self._what, self._mine, self._total = work, what, mine, total
        self._last, self._told = time.monotonic(), 0

    def at(self, done: int) -> None:
        if time.monotonic() - self._last >= _SAY_EVERY_S:
            self._last = time.monotonic()
            share = f" (this process's share of {self._total:,})" if self._mine < self._total else ""
            self._work.message(f"{self._what}: {done:,} of {self._mine:,}{share}")

    def bad(self, why: str) -> None:
        self._told += 1
        if self._told <= 3:  # all of them are named, by number, at the end
            self._work.message(f"bad file: {why}")
