"""Feeds this rank's micro-batches to the training loop, starting at the first sample that no step has consumed.

The micro-batches are a pure function of the number of samples consumed and of the micro-batch size. So the feed can
start again at any step: with smaller micro-batches after running out of memory, for a trial, or on more or fewer ranks.

If the data is a stream, the feed also knows the stream's position after each step, and starts again from there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from unisono.data.cursor import Cursor, TrialCursor
from unisono.data.loader import Loader, MicroBatch
from unisono.data.order import Order
from unisono.data.resident import ResidentLoader, is_resident
from unisono.data.shapes import shapes_of
from unisono.data.stream import StreamPosition, is_stream
from unisono.engine.batch import BatchPlan
from unisono.engine.training_run import TrainingRun
from unisono.observe.folder import append_event
from unisono.settings import DataSettings


class Feed:
    """Reads a run's training data on this rank."""

    def __init__(self, run: TrainingRun, order: Order) -> None:
        components, data = run.components, run.datasets.train
        self._recipe, self._state = components.recipe, components.state
        self._placement, self._order = components.strategy.placement, order
        self._data = data.to(self._placement.device) if is_resident(data) else data
        self._shapes = None if is_stream(data) else shapes_of(self._data, order)
        self._settings, self._run_folder = run.settings.data, run.folder.path
        # A caller that drives the run may train past its planned end, so the feed has no end. Such a caller trains
        # whole epochs, each of which ends with a step.
        self._end = None if self._recipe.whole_epochs else run.length.samples
        self._loader: Loader | ResidentLoader | None = None
        self._agreement = run.rank.agreement
        self._positions = dict[int, StreamPosition]()  # positions in the stream, by number of samples consumed
        if is_stream(data):
            stored, parts = run.checkpoint.streams, self._placement.data_world
            position = StreamPosition.beginning(data, parts) if stored is None else stored[self._placement.data_rank]
            self._positions[self._state.samples] = position

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        assert self._loader is not None
        micro = next(self._loader)
        if micro.after is not None and micro.chunk.last:
            self._positions = {at: each for at, each in self._positions.items() if at >= self._state.samples}
            self._positions[micro.chunk.global_batch[-1] + 1] = micro.after
        return micro

    def to_json(self) -> dict[str, Any]:
        """Returns what a checkpoint stores about the data besides the number of samples; every rank calls it."""
        if not self._positions:
            return {}
        mine = self._placement.data_rank, self._positions[self._state.samples].to_json()
        return {"streams": [position for _, position in sorted(dict(self._agreement.all_gather(mine)).items())]}

    def begin(self, plan: BatchPlan) -> None:
        """Starts reading at the next sample in micro-batches of the plan; drops prefetched batches."""
        self.close()
        self._loader = self._read(self._cursor(plan), self._settings)

    def for_trial(self, plan: BatchPlan) -> Loader | ResidentLoader:
        """Returns a separate loader of the micro-batches that need the most memory under the plan."""
        return self._read(self._cursor(plan, TrialCursor), replace(self._settings, num_workers=0))

    @property
    def data(self) -> Any:
        """The training data, on the device if the dataset supports that."""
        return self._data

    def most_at_once(self, plan: BatchPlan) -> int:
        """Returns the size of the next step's largest micro-batch per device, the same on every rank."""
        return -(-self._cursor(plan).most_at_once() // len(self._placement.devices))

    @property
    def is_reading(self) -> bool:
        """Whether the feed is between `begin` and `close`."""
        return self._loader is not None

    def close(self) -> None:
        """Ends the loader workers."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def _cursor(self, plan: BatchPlan, kind: type[Cursor] = Cursor) -> Cursor:
        placement = self._placement
        return kind(
            start=self._state.samples,
            end=self._end,
            global_batch=plan.global_batch,
            micro_batch=plan.micro_batch * len(placement.devices),
            rank=placement.data_rank,
            world=placement.data_world,
            shapes=self._shapes,
            epoch=self._order.num_samples if self._recipe.whole_epochs else None,
        )

    def _read(self, cursor: Cursor, settings: DataSettings) -> Loader | ResidentLoader:
        if is_resident(self._data):
            return ResidentLoader(self._data, self._order, cursor, self._placement.device)
        pin = self._placement.device.type == "cuda"
        collate, position = self._recipe.collate, self._positions.get(self._state.samples)
        return Loader(self._data, collate, self._order, cursor, settings, pin, self._on_worker_death, position)

    def _on_worker_death(self, text: str) -> None:
        rank = self._placement.rank
        append_event(self._run_folder, "worker_died", step=self._state.step + 1, rank=rank, what=text)
        print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
