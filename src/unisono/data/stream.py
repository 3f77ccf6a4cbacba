"""Reads the samples of a stream: an IterableDataset that can save and restore its position.

Each rank reads a stream of its own, and a checkpoint stores the position of every stream. A dataset that is read by
index needs no such state, because its order is a pure function. A checkpoint stores the position after the samples that
steps have consumed, although workers have read ahead. So each micro-batch carries the position after its last sample,
and reading can begin again at any of them.

The position is the state_dict of the dataset, or of its iterator: the protocol of torchdata's StatefulDataLoader.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from unisono.data.bits import Purpose, key_of
from unisono.data.cursor import Chunk
from unisono.data.order import Order
from unisono.data.reading import LocalValue, ReadChunk, Stopped
from unisono.data.seeding import seed_everything
from unisono.data.state_json import from_json, to_json
from unisono.errors import RecipeError

ENDLESS = 2**62
"""Placeholder for the unknown number of samples of a stream."""

_MOST_BYTES = 32 * 2**20  # limit for the states of all ranks; a checkpoint's JSON may have 64 MiB


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is read as a stream, and not by index."""
    return isinstance(dataset, IterableDataset)


def is_stateful(dataset: Any) -> bool:
    """Whether an object can save and restore its position."""
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


@dataclass(frozen=True)
class StreamPosition:
    """The position of a rank's stream between two samples."""

    epoch: int = 0  # number of times that the stream has ended
    samples: int = 0  # number of samples read from the stream since the beginning of the run
    state: Any = None  # result of state_dict(), as JSON; None: the beginning

    def to_json(self) -> dict[str, Any]:
        """Returns the position as a JSON value."""
        return {"epoch": self.epoch, "samples": self.samples, "state": self.state}

    @classmethod
    def from_json(cls, value: Any) -> StreamPosition:
        """Reads a position from an untrusted JSON value; raises ValueError if it is not a position."""
        if not isinstance(value, dict) or value.keys() != {"epoch", "samples", "state"}:
            raise ValueError("it is no position of a stream")
        for name in ("epoch", "samples"):
            if type(value[name]) is not int or not 0 <= value[name] <= ENDLESS:
                raise ValueError(f"its {name} cannot be {value[name]!r:.40}")
        from_json(value["state"])
        return cls(**value)

    @classmethod
    def beginning(cls, dataset: Any, parts: int) -> StreamPosition:
        """Returns the position at the beginning of a dataset."""
        return cls(state=_state_of(dataset, parts) if is_stateful(dataset) else None)


class StreamReader:
    """Reads the samples of this rank's chunks from its stream, one chunk after the other."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        order: Order,
        part: tuple[int, int],
        position: StreamPosition,
    ) -> None:
        """`part`: the number of this stream, and how many there are."""
        self.dataset, self.collate, self.order, self._part = dataset, collate, order, part
        self.position = position
        """The position after the last chunk; it can be set before the first chunk."""
        self._iterator: Iterator[Any] | None = None
        self._epoch, self._samples, self._is_resumed = 0, 0, False
        self._held: list[Any] = []  # a sample that was read for a dummy, and belongs to the next chunk
        self.now, self.stop = LocalValue(-1), LocalValue(0)  # as in ChunkReader

    def __call__(self, chunk: Chunk) -> ReadChunk:
        """Reads as many samples as the chunk has. A dummy gets a copy of the next sample, which it does not consume."""
        if self._iterator is None:
            self._begin()
        if chunk.is_dummy:
            self._held = self._held or [self._read(chunk.positions[0])]
            copies = copy.deepcopy(self._held)  # collate() may change a sample in place
            return ReadChunk(self._collated(copies), chunk.positions, True, (), self.position)
        items, self._held = self._held, []
        items += [self._read(position) for position in chunk.positions[len(items) :]]
        self.position = StreamPosition(self._epoch, self._samples, self._state())
        return ReadChunk(self._collated(items), chunk.positions, False, (), self.position)

    def announce(self, chunk: Chunk) -> None:
        """Does nothing: a stream reads ahead itself, if at all."""

    def index(self, position: int) -> int:
        """Returns the position itself, which messages show, because samples of a stream have no index."""
        return position

    def _begin(self) -> None:
        self._epoch, self._samples, self._is_resumed = self.position.epoch, self.position.samples, True
        state = from_json(self.position.state)
        if state is not None and is_stateful(self.dataset):
            self._set_epoch()
            self.dataset.load_state_dict(state)
            self._iterator = iter(self.dataset)
            return
        self._iterate()
        if state is not None:
            self._iterator.load_state_dict(state)  # type: ignore[union-attr]

    def _iterate(self) -> None:
        self._set_epoch()
        self._iterator = iter(self.dataset)
        if not is_stateful(self.dataset) and not is_stateful(self._iterator):
            raise RecipeError(without_state(self.dataset))

    def _set_epoch(self) -> None:
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(self._epoch)

    def _read(self, position: int) -> Any:
        if self.stop.value:
            raise Stopped
        # Do not use the position in the run: which sample a dummy reads ahead depends on the micro-batches.
        seed_everything(key_of(Purpose.ITEM, self.order.seed, self._part[0], self._samples))
        self.now.value = position
        try:
            item = self._next()
        finally:
            self.now.value = -1
        self._samples += 1
        self._is_resumed = False
        return item

    def _next(self) -> Any:
        assert self._iterator is not None
        for _ in range(2 if self._is_resumed else 1):  # the stream may have been saved at its end
            try:
                return next(self._iterator)
            except StopIteration:
                self._epoch += 1
                self._iterate()
        try:
            return next(self._iterator)
        except StopIteration:
            number, parts = self._part
            raise RecipeError(
                f'dataset("train"): the stream of rank {number} of {parts} has no samples in epoch {self._epoch}; '
                "__iter__() must begin again after the last sample, and every rank needs samples"
            ) from None

    def _state(self) -> Any:
        return _state_of(self.dataset if is_stateful(self.dataset) else self._iterator, self._part[1])

    def _collated(self, items: list[Any]) -> Any:
        return self.collate(list(items))


def _state_of(stateful: Any, parts: int) -> Any:
    state = to_json(stateful.state_dict())
    size, most = len(json.dumps(state)), _MOST_BYTES // parts
    if size > most:
        raise RecipeError(
            f"state_dict() of the stream has {size:,} bytes, and a checkpoint stores at most {most:,} for each rank"
        )
    return state


def without_state(dataset: Any) -> str:
    """Returns the error for a stream that cannot be resumed."""
    return (
        f'dataset("train") returned {type(dataset).__name__}, an IterableDataset without state_dict() and '
        "load_state_dict(), so a run could not resume at the next sample; define both, or return a map-style dataset"
    )
