"""Computes the missing entries of a cache. Threads read ahead, the device computes, and results are packed."""

from __future__ import annotations

import gc
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

_READERS = 4  # number of threads that decode while the device encodes, and of samples to read ahead
_NAMED = 3  # number of bad files to report individually

Item = TypeVar("Item")
Finish = Callable[[], Tensor]
"""Computes the entry of a sample that has been read; runs on the device, one sample at a time."""


def fill(
    work: Work, packs: Packs, bad: BadFiles, what: str, items: Mapping[str, Item], read: Callable[[Item], Finish]
) -> None:
    """Computes this rank's share of the missing entries.

    `read` runs in a thread and returns a function that computes the entry; this function runs in the calling thread.
    Ranks divide all items, not only the missing ones: a rank that looked later would see fewer missing items and divide
    them differently.
    """
    if work.stopping:  # returns before the progress line appears
        return
    present = packs.find()
    missing = [key for key in work.share(list(items)) if key not in present]
    num_bad = 0
    with (
        work.progress(what, len(missing), of=len(items)) as advance,
        Packing(packs) as packing,
        closing(_read_ahead(missing, items, read)) as ready,
    ):
        for key, reading in ready:
            if work.stopping:
                return
            try:
                packing.add(key, reading.result()())
            except BadMedia as error:
                bad.record(key, str(error))
                num_bad += 1
                if num_bad <= _NAMED:  # a summary of all bad files follows at the end
                    work.message(f"bad file: {error}")
            advance()


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
def loaded_on_demand(load: Callable[[], Model], device: str) -> Iterator[Callable[[], Model]]:
    """Yields a function that loads a model on its first call and returns it; frees the model when the context ends."""
    loaded: list[Model] = []

    def get() -> Model:
        if not loaded:
            loaded.append(load())
            loaded[0].to(device)
        return loaded[0]

    try:
        yield get
    finally:
        loaded.clear()
        if torch.device(device).type == "cuda":  # training may need all of the GPU's memory
            gc.collect()  # models of diffusers and transformers contain reference cycles
            torch.cuda.empty_cache()
