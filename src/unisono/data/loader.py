"""From positions in the stream to micro-batches.

The stream of micro-batches is a pure function of where it starts, so loader workers may run ahead as far as they like
and any number of them gives the same batches. Each item is read with python, numpy and torch seeded by its position:
augmentation in `Dataset[i]` repeats exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data._utils.pin_memory import pin_memory

from unisono.data.cursor import Chunk, Cursor
from unisono.data.nested import mapped
from unisono.data.order import Order
from unisono.data.prefetch_stream import PrefetchStream, is_worth_prefetching
from unisono.data.reading import BadSample, ChunkReader
from unisono.data.workers import Workers
from unisono.settings import DataSettings

__all__ = ["BadSample", "Chunk", "Cursor", "Loader", "MicroBatch", "positions_tensor", "to_device"]


@dataclass(frozen=True)
class MicroBatch:
    """A chunk and its data, less the samples that could not be read."""

    chunk: Chunk
    data: Any
    positions: Sequence[int]  # of the samples that are in `data`, in order
    is_dummy: bool  # `data` is another micro-batch's sample and counts with weight 0
    bad: tuple[BadSample, ...] = ()  # of the chunk's own samples: over all micro-batches and ranks each once


class Loader:
    """This rank's micro-batches, read ahead by workers."""

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], Any],
        order: Order,
        cursor: Cursor,
        settings: DataSettings,
        pin: bool,
        on_worker_death: Callable[[str], None] | None = None,
    ) -> None:
        """`on_worker_death` is told, in a sentence, when a worker died and another takes its place."""
        self._chunks = cursor.chunks()
        self._reader = ChunkReader(dataset, collate, order, settings.max_bad_samples)
        self._pin = pin and settings.pin_memory and torch.accelerator.is_available()
        self._workers: Workers | None = None
        if settings.num_workers:
            self._workers = Workers(
                self._reader, cursor, settings.num_workers, settings.prefetch_factor, self._pin, on_worker_death
            )

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        chunk = next(self._chunks)
        if self._workers is not None:
            data, positions, is_dummy, bad = self._workers.take(chunk)
        else:
            data, positions, is_dummy, bad = self._reader(chunk)
            if self._pin:
                data = pin_memory(data)  # type: ignore[no-untyped-call]
        return MicroBatch(chunk, data, positions, is_dummy, bad)

    def close(self) -> None:
        """Ends the workers now, also those that are dead or hang."""
        self._chunks = iter(())
        if self._workers is not None:
            self._workers.close()
            self._workers = None


def to_device(data: Any, device: torch.device, floating: torch.dtype | None = None) -> Any:
    """The batch on `device` (and in another floating type, if given), through any nesting of containers.

    Large parts are copied beside what a GPU is doing: the host is ahead of it, by most of a step.
    """
    prefetch: PrefetchStream | None = None

    def moved(leaf: Any) -> Any:
        nonlocal prefetch
        if not isinstance(leaf, Tensor):
            return leaf.to(device) if hasattr(leaf, "to") else leaf
        dtype = floating if floating is not None and leaf.is_floating_point() else leaf.dtype
        if not is_worth_prefetching(leaf, device):
            return leaf.to(device, dtype, non_blocking=True)
        prefetch = prefetch or PrefetchStream.on(device)
        return prefetch.copied(leaf, dtype)

    return mapped(data, moved)


def positions_tensor(positions: Sequence[int], device: torch.device) -> Tensor:
    """The positions of a micro-batch on the device."""
    if isinstance(positions, range):  # made on the device: the cheapest way there
        return torch.arange(positions.start, positions.stop, device=device)
    found = torch.tensor(positions)
    # From ordinary memory a copy would wait for the device.
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)
