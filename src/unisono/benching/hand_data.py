"""Reads a run's samples, in the run's order, with torch's DataLoader: the data of the hand-written loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from unisono.data.bits import Purpose, key_of
from unisono.data.cursor import Chunk, Cursor
from unisono.data.nested import mapped
from unisono.data.order import Order
from unisono.data.resident import is_resident
from unisono.data.seeding import seed_everything
from unisono.data.shapes import shapes_of
from unisono.engine.batch import BatchPlan
from unisono.engine.training_run import TrainingRun


@dataclass(frozen=True)
class HandMicroBatch:
    """One micro-batch of this rank."""

    data: Any
    positions: Tensor
    weight: float  # 0 if this rank had no sample left and computes one of another rank
    is_last: bool  # whether it is the last one of its step


class HandData:
    """This rank's micro-batches from the first step on."""

    def __init__(self, run: TrainingRun, data: Any, order: Order, plan: BatchPlan, *, draws: bool) -> None:
        """`data` is the training data, on the device if it can be; `draws`: reading a sample draws random numbers."""
        settings, placement = run.settings.data, run.components.strategy.placement
        self._device = placement.device
        self._floating = torch.float64 if run.settings.precision.dtype == "float64" else None
        # All indices are computed before the measurement, as a sampler does that permutes once per epoch.
        self._chunks = list(_cursor(run, data, order, plan).chunks())
        indices = [order.indices(np.asarray(chunk.positions)) for chunk in self._chunks]
        self._number = 0
        if is_resident(data):
            on_device = [torch.from_numpy(each).to(self._device) for each in indices]
            self._batches: Iterator[Any] = (data.gather(each) for each in on_device)
            return
        pairs = [
            list(zip(chunk.positions, each.tolist(), strict=True))
            for chunk, each in zip(self._chunks, indices, strict=True)
        ]
        workers = settings.num_workers
        self._batches = iter(
            DataLoader(
                _Samples(data, order.seed if draws else None),
                batch_sampler=pairs,  # keys of the dataset, which need not be numbers
                collate_fn=run.components.recipe.collate,
                num_workers=workers,
                prefetch_factor=settings.prefetch_factor if workers else None,
                pin_memory=settings.pin_memory and self._device.type == "cuda",
            )
        )

    def step(self) -> Iterator[HandMicroBatch]:
        """Yields the micro-batches of the next step."""
        is_last = False
        while not is_last:
            chunk, self._number = self._chunks[self._number], self._number + 1
            is_last = chunk.last
            data = mapped(next(self._batches), self._moved)
            yield HandMicroBatch(data, _positions(chunk, self._device), 0.0 if chunk.is_dummy else 1.0, is_last)

    def _moved(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf.to(self._device) if hasattr(leaf, "to") else leaf
        dtype = self._floating if self._floating is not None and leaf.is_floating_point() else leaf.dtype
        return leaf.to(self._device, dtype, non_blocking=True)

    @property
    def samples_at_once(self) -> int:
        """The number of samples of each of this rank's micro-batches; 0 if they differ."""
        sizes = {0 if chunk.is_dummy else len(chunk.positions) for chunk in self._chunks}
        return sizes.pop() if len(sizes) == 1 else 0

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


class _Samples(Dataset[Any]):
    """The dataset by (position, index) pairs. If reading draws random numbers, each position has its own seed."""

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
