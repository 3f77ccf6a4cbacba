"""Data loading of the hand-written loop: reads the run's samples in the run's order, with torch's DataLoader."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from unisono.data.bits import Purpose, key_of
from unisono.data.cursor import Chunk, Cursor
from unisono.data.nested import mapped
from unisono.data.order import Order
from unisono.data.resident import is_resident
from unisono.data.seeding import seed_everything
from unisono.data.shapes import shapes_of
from unisono.engine.batch import BatchPlan
from unisono.engine.training_run import TrainingRun

_AHEAD = 512  # number of micro-batches for which indices are computed at once


@dataclass(frozen=True)
class HandMicroBatch:
    """One micro-batch of this rank."""

    data: Any
    positions: Tensor
    weight: float  # 0 if this rank has no sample left and repeats another rank's sample, otherwise 1
    is_last: bool  # whether it is the last micro-batch of its step


class HandData:
    """This rank's micro-batches, beginning with the first step."""

    def __init__(self, run: TrainingRun, data: Any, order: Order, plan: BatchPlan, *, draws: bool) -> None:
        """`data` is the training data, on the device if possible. `draws`: reading a sample draws random numbers."""
        settings, placement = run.settings.data, run.components.strategy.placement
        self._device = placement.device
        self._floating = torch.float64 if run.settings.precision.dtype == "float64" else None
        self._order, self._chunks = order, _cursor(run, data, order, plan).chunks()
        self._read = deque[Chunk]()  # chunks whose indices the loader has fetched
        first = self._next_indices()
        sizes = {0 if chunk.is_dummy else len(chunk.positions) for chunk in self._read}
        self.samples_at_once = sizes.pop() if len(sizes) == 1 else 0
        """The number of samples of each of this rank's micro-batches; 0 if they differ."""
        indices = itertools.chain(first, itertools.chain.from_iterable(iter(self._next_indices, [])))
        if is_resident(data):
            on_device = (torch.from_numpy(each).to(self._device, non_blocking=True) for _, each in indices)
            self._batches: Iterator[Any] = (data.gather(each) for each in on_device)
            return
        workers = settings.num_workers
        self._batches = iter(
            DataLoader(
                _Samples(data, order.seed if draws else None),
                # The indices are keys of the dataset, which need not be numbers.
                batch_sampler=_Pairs(list(zip(positions, each.tolist(), strict=True)) for positions, each in indices),
                collate_fn=run.components.recipe.collate,
                num_workers=workers,
                prefetch_factor=settings.prefetch_factor if workers else None,
                pin_memory=settings.pin_memory and self._device.type == "cuda",
            )
        )

    def _next_indices(self) -> list[tuple[Sequence[int], Any]]:
        """Returns positions and indices of the next micro-batches, computed at once to save time."""
        chunks = list(itertools.islice(self._chunks, _AHEAD))
        if not chunks:
            return []
        self._read.extend(chunks)
        ends = np.cumsum([len(chunk.positions) for chunk in chunks])
        positions = np.concatenate([np.asarray(chunk.positions) for chunk in chunks])
        by_chunk = np.split(self._order.indices(positions), ends[:-1])
        return [(chunk.positions, each) for chunk, each in zip(chunks, by_chunk, strict=True)]

    def step(self) -> Iterator[HandMicroBatch]:
        """Yields the micro-batches of the next step."""
        is_last = False
        while not is_last:
            batch = next(self._batches)  # may compute further indices, and thereby append the next chunk
            chunk = self._read.popleft()
            is_last, data = chunk.last, mapped(batch, self._moved)
            yield HandMicroBatch(data, _positions(chunk, self._device), 0.0 if chunk.is_dummy else 1.0, is_last)

    def _moved(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf.to(self._device) if hasattr(leaf, "to") else leaf
        dtype = self._floating if self._floating is not None and leaf.is_floating_point() else leaf.dtype
        return leaf.to(self._device, dtype, non_blocking=True)

    def close(self) -> None:
        """Ends the loader's workers."""
        self._batches = iter(())


def _cursor(run: TrainingRun, data: Any, order: Order, plan: BatchPlan) -> Cursor:
    placement = run.components.strategy.placement
    return Cursor(
        start=0,
        end=run.length.samples,
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        rank=placement.data_rank,
        world=placement.data_world,
        shapes=shapes_of(data, order),
    )


class _Pairs(Sampler[list[tuple[int, int]]]):
    """A sampler of batches of (position, index) pairs."""

    def __init__(self, pairs: Iterator[list[tuple[int, int]]]) -> None:
        self._pairs = pairs

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._pairs


class _Samples(Dataset[Any]):
    """The dataset, indexed by (position, index). If reading draws random numbers, each position sets its own seed."""

    def __init__(self, data: Any, seed: int | None) -> None:
        self._data, self._seed = data, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        position, index = key
        if self._seed is not None:
            seed_everything(key_of(Purpose.ITEM, self._seed, position))
        return self._data[index]


def _positions(chunk: Chunk, device: torch.device) -> Tensor:
    positions: Sequence[int] = chunk.positions
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop, device=device)
    return torch.tensor(positions, device=device)
