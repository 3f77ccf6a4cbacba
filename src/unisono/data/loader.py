"""Loads micro-batches.

The stream of micro-batches is a pure function of its start, so loader workers can prefetch, and any number of workers
gives the same batches. Before each sample is read, Python, numpy and torch are seeded with its position, so random
augmentation in `Dataset[i]` is repeatable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from unisono.data.stream import StreamPosition, StreamReader
from unisono.data.workers import Workers
from unisono.settings import DataSettings

__all__ = ["BadSample", "Chunk", "Cursor", "Loader", "MicroBatch", "positions_tensor", "to_device"]


@dataclass(frozen=True)
class MicroBatch:
    """A chunk and its data, without unreadable samples."""

    chunk: Chunk
    data: Any
    positions: Sequence[int]  # positions of the samples in `data`, in order
    is_dummy: bool  # whether `data` is a sample of another micro-batch, to be used with weight 0
    bad: tuple[BadSample, ...] = ()  # the chunk's unreadable samples; no other micro-batch or rank reports them
    after: StreamPosition | None = None  # for a stream: its position after these samples


class Loader:
    """Yields this rank's micro-batches, which workers prefetch."""

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], Any],
        order: Order,
        cursor: Cursor,
        settings: DataSettings,
        pin: bool,
        on_worker_death: Callable[[str], None] | None = None,
        position: StreamPosition | None = None,
    ) -> None:
        """When the loader replaces a worker that died, it calls `on_worker_death` with a description of the death.

        `position`: where to begin, if the dataset is a stream.
        """
        self._chunks = cursor.chunks()
        self._reader: ChunkReader | StreamReader
        if position is None:
            self._reader = ChunkReader(dataset, collate, order, settings.max_bad_samples)
        else:
            self._reader = StreamReader(dataset, collate, order, (cursor.rank, cursor.world), position)
            settings = replace(settings, num_workers=min(settings.num_workers, 1))  # a stream has one reader
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
            data, positions, is_dummy, bad, after = self._workers.take(chunk)
            if isinstance(self._reader, StreamReader):
                self._reader.position = after  # where the replacement of a dead worker begins
        else:
            self._reader.announce(chunk)
            data, positions, is_dummy, bad, after = self._reader(chunk)
            if self._pin:
                data = pin_memory(data)  # type: ignore[no-untyped-call]
        return MicroBatch(chunk, data, positions, is_dummy, bad, after)

    def close(self) -> None:
        """Ends all workers, including dead and hanging ones."""
        self._chunks = iter(())
        if self._workers is not None:
            self._workers.close()
            self._workers = None


def to_device(data: Any, device: torch.device, floating: torch.dtype | None = None) -> Any:
    """Moves a batch (nested containers of tensors) to `device`, and casts floating-point tensors to `floating`.

    Large tensors are copied to a GPU on the prefetch stream.
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
    """Returns the positions of a micro-batch as a tensor on the device."""
    if isinstance(positions, range):  # can be computed on the device, without a copy
        return torch.arange(positions.start, positions.stop, device=device)
    tensor = torch.tensor(positions)
    # A copy from pageable memory would synchronise with the device.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
