"""This rank's micro-batches, always from the first sample that no step has consumed.

Which they are is a pure function of the samples consumed and of the size of a micro-batch, so a feed can be made anew
at any step: with smaller micro-batches when memory ran out, for a trial, or on another number of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from unisono.data.cursor import Cursor, TrialCursor
from unisono.data.loader import Loader, MicroBatch
from unisono.data.order import Order
from unisono.data.resident import ResidentLoader, is_resident
from unisono.data.shapes import shapes_of
from unisono.engine.batch import BatchPlan
from unisono.engine.recipe import Recipe
from unisono.engine.state import TrainState
from unisono.observe.folder import append_event
from unisono.parallel.strategy import Placement
from unisono.settings import DataSettings


class Feed:
    """Reads a run's training data on this rank."""

    def __init__(
        self,
        data: Dataset[Any],
        order: Order,
        recipe: Recipe,
        place: Placement,
        state: TrainState,
        settings: DataSettings,
        run_folder: Path,
        end: int | None,
    ) -> None:
        """`end` is the number of samples at which the run ends, where that is known."""
        self._data = data.to(place.device) if is_resident(data) else data
        self._order, self._recipe, self._place = order, recipe, place
        self._shapes = shapes_of(self._data, order)
        self._state, self._settings, self._run_folder, self._end = state, settings, run_folder, end
        self._loader: Loader | ResidentLoader | None = None

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        assert self._loader is not None
        return next(self._loader)

    def begin(self, plan: BatchPlan) -> None:
        """Reads on from here in micro-batches of the plan; what workers had read ahead is dropped."""
        self.close()
        self._loader = self._read(self._cursor(plan), self._settings)

    def for_trial(self, plan: BatchPlan) -> Loader | ResidentLoader:
        """A reader of its own, of the micro-batches that need most memory under the plan."""
        return self._read(self._cursor(plan, TrialCursor), replace(self._settings, num_workers=0))

    def most_at_once(self, plan: BatchPlan) -> int:
        """How many samples a device has at once in the next step where it needs most memory, the same on every rank."""
        return -(-self._cursor(plan).most_at_once() // len(self._place.devices))

    @property
    def is_reading(self) -> bool:
        """Whether it has begun and was not closed since."""
        return self._loader is not None

    def close(self) -> None:
        """Ends the workers."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def _cursor(self, plan: BatchPlan, kind: type[Cursor] = Cursor) -> Cursor:
        place = self._place
        return kind(
            start=self._state.samples,
            end=self._end,
            global_batch=plan.global_batch,
            micro_batch=plan.micro_batch * len(place.devices),
            rank=place.rank,
            world=place.world,
            shapes=self._shapes,
            epoch=self._order.num_samples if self._recipe.whole_epochs else None,
        )

    def _read(self, cursor: Cursor, settings: DataSettings) -> Loader | ResidentLoader:
        if is_resident(self._data):
            return ResidentLoader(self._data, self._order, cursor, self._place.device)
        pin = self._place.device.type == "cuda"
        return Loader(self._data, self._recipe.collate, self._order, cursor, settings, pin, self._on_worker_death)

    def _on_worker_death(self, text: str) -> None:
        rank = self._place.rank
        append_event(self._run_folder, "worker_died", step=self._state.step + 1, rank=rank, what=text)
        print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
