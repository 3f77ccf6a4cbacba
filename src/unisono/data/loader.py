"""From positions in the stream to micro-batches.

The stream of micro-batches is a pure function of where it starts, so loader workers may run ahead as far as they like
and any number of them gives the same batches. Each item is read with python, numpy and torch seeded by its position:
augmentation in `Dataset[i]` repeats exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from unisono.cluster.lifetime import start_loader_worker
from unisono.data.bits import Purpose, key_of
from unisono.data.order import Order, num_micro_batches, share_of, split
from unisono.data.seeding import seed_everything
from unisono.settings import DataSettings

_LOOK_AHEAD = 1024  # positions whose order is worked out at once: for a micro-batch alone numpy's calls would cost more


@dataclass(frozen=True)
class Chunk:
    """One micro-batch of one rank: which positions, and where it stands in its step."""

    positions: range
    last: bool
    stand_in: bool  # no sample was left for this rank: it computes another rank's sample with weight 0


@dataclass(frozen=True)
class MicroBatch:
    """A chunk and its data."""

    chunk: Chunk
    data: Any


@dataclass(frozen=True)
class Cursor:
    """Where a rank reads: the stream from `start` to `end` in global batches, this rank's part of each."""

    start: int
    end: int | None
    global_batch: int
    micro_batch: int
    rank: int
    world: int

    def chunks(self) -> Iterator[Chunk]:
        """This rank's micro-batches in order; every rank has the same number of them in every step."""
        start = self.start
        while self.end is None or start < self.end:
            count = self.global_batch if self.end is None else min(self.global_batch, self.end - start)
            parts = num_micro_batches(count, self.world, self.micro_batch)
            for number, positions in enumerate(split(share_of(self.rank, self.world, start, count), parts)):
                stand_in = len(positions) == 0
                if stand_in:
                    positions = range(start, start + 1)
                yield Chunk(positions, last=number == parts - 1, stand_in=stand_in)
            start += count


class _PositionedDataset(Dataset[Any]):
    """Reads the items at stream positions, each with its own seed."""

    def __init__(self, dataset: Dataset[Any], order: Order) -> None:
        self.dataset, self.order = dataset, order
        self._known: tuple[int, list[int]] = (0, [])  # first position, and the indices from there on

    def __getitems__(self, positions: list[int]) -> list[Any]:
        items = []
        for position in positions:
            seed_everything(key_of(Purpose.ITEM, self.order.seed, position))
            items.append(self.dataset[self._index(position)])
        return items

    def _index(self, position: int) -> int:
        first, indices = self._known
        if not first <= position < first + len(indices):
            first, indices = position, self.order.indices(np.arange(position, position + _LOOK_AHEAD)).tolist()
            self._known = first, indices
        return indices[position - first]


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
    ) -> None:
        workers = settings.num_workers
        self._chunks = cursor.chunks()
        self._batches = iter(
            DataLoader(
                _PositionedDataset(dataset, order),
                # The same pure function as self._chunks, running ahead of it.
                batch_sampler=_positions(cursor),
                collate_fn=collate,
                num_workers=workers,
                prefetch_factor=settings.prefetch_factor if workers else None,
                pin_memory=pin and settings.pin_memory,
                worker_init_fn=start_loader_worker,
                generator=torch.Generator(),  # draws the workers' seeds, otherwise from the training's own generator
            )
        )

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        chunk = next(self._chunks)
        return MicroBatch(chunk, next(self._batches))

    def close(self) -> None:
        """Ends the workers now rather than at garbage collection."""
        shut_down = getattr(self._batches, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


def _positions(cursor: Cursor) -> Iterator[list[int]]:
    return (list(chunk.positions) for chunk in cursor.chunks())


def place(data: Any, device: torch.device, floating: torch.dtype | None = None) -> Any:
    """The batch on `device` (and in another floating type, if given), through any nesting of containers."""
    if isinstance(data, Tensor):
        dtype = floating if floating is not None and data.is_floating_point() else data.dtype
        return data.to(device, dtype, non_blocking=True)
    if isinstance(data, dict):
        return {key: place(value, device, floating) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(place(value, device, floating) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(place(value, device, floating) for value in data)
    if is_dataclass(data) and not isinstance(data, type):
        return replace(data, **{f.name: place(getattr(data, f.name), device, floating) for f in fields(data)})
    return data.to(device) if hasattr(data, "to") else data
