"""Reads the samples of a micro-batch, each with a seed of its own, and leaves out what cannot be read.

A sample that raises is read once more with the same seed, after a short pause (files on a network come and go; the
pause grows while one sample after the other fails). If it raises again it is handed on as a `BadSample` and the
micro-batch consists of the others. What to do about bad samples is for all ranks to agree on, not for a loader.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from unisono import tracebacks
from unisono.data.bits import Purpose, key_of
from unisono.data.cursor import Chunk
from unisono.data.order import Order
from unisono.data.seeding import seed_everything
from unisono.errors import RecipeError, UnisonoError

_LOOK_AHEAD = 1024  # positions whose order is worked out at once: for a micro-batch alone numpy's calls would cost more
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0  # before a second try
_PATIENCE_S = 3.0  # of pauses since the last sample that could be read: then waiting has not helped
_ERROR_LENGTH, _TRACEBACK_LINES = 300, 12
_STAND_INS = 64  # samples tried, at least, before the data set as a whole is taken for unreadable
_NOT_THE_SAMPLES_FAULT = (MemoryError, torch.OutOfMemoryError)  # on another rank or another day it can be read


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be read, twice."""

    position: int
    index: int  # in the data set
    error: str  # one line
    traceback: str  # its last lines, for the log

    def __str__(self) -> str:
        return f"sample {self.index} (position {self.position}): {self.error}"


class Stopped(BaseException):
    """Reading was stopped between two samples, because the loader closes."""


class ReadChunk(NamedTuple):
    """What came of a chunk."""

    data: Any
    positions: Sequence[int]  # of the samples in `data`, in order
    is_dummy: bool
    bad: tuple[BadSample, ...]


@dataclass
class Number:
    """A number that somebody else may see or set: a stand-in for one in shared memory."""

    value: int


class ChunkReader:
    """Reads the samples of a chunk and collates them."""

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], order: Order, max_bad_samples: int = 0
    ) -> None:
        self.dataset, self.collate, self.order = dataset, collate, order
        # A global batch with more bad samples than are allowed ends the run anyway: no need to look any further.
        self._tries = max(_STAND_INS, max_bad_samples + 1)
        self._known: tuple[int, list[int]] = (0, [])  # first position, and the indices from there on
        self._pauses = 0.0, 0  # seconds and number since the last sample that could be read
        self.now = Number(-1)
        """The position being read, -1 when none is: in a worker it lies in memory that the training process sees."""
        self.stop = Number(0)
        """Not 0: nothing more shall be read; likewise in shared memory."""

    def __call__(self, chunk: Chunk) -> ReadChunk:
        """The data of a chunk without its bad samples.

        Where nothing is left, another sample of the same global batch stands in for it. Bad samples are reported by
        the chunk they belong to and by no other, so that they add up over micro-batches and ranks.
        """
        if chunk.is_dummy:
            return self._stand_in(chunk, ())
        items, positions, bad = [], [], []
        for position in chunk.positions:
            item = self._read(position)
            if isinstance(item, BadSample):
                bad.append(item)
            else:
                items.append(item)
                positions.append(position)
        if not items:
            return self._stand_in(chunk, tuple(bad))
        return ReadChunk(self._collated(items, positions), positions if bad else chunk.positions, False, tuple(bad))

    def index(self, position: int) -> int:
        """The index in the data set of the sample at `position`."""
        first, indices = self._known
        if not first <= position < first + len(indices):
            first, indices = position, self.order.indices(np.arange(position, position + _LOOK_AHEAD)).tolist()
            self._known = first, indices
        return indices[position - first]

    def _read(self, position: int) -> Any:
        """The sample at `position`, or a BadSample when that has failed twice."""
        try:
            return self._good(self._item(position))
        except _NOT_THE_SAMPLES_FAULT:
            raise
        except Exception:
            pass  # a second time, outside of the handler: the first error's traceback holds the first try's memory
        self._pause()
        try:
            return self._good(self._item(position))
        except _NOT_THE_SAMPLES_FAULT:
            raise
        except Exception as error:
            only = " ".join("".join(traceback.format_exception_only(error)).split())
            lines = "".join(traceback.format_exception(error)).splitlines()
            shown = f"{_shortened(only)} ({tracebacks.location(error)})"
            return BadSample(position, self.index(position), shown, "\n".join(lines[-_TRACEBACK_LINES:]))

    def _good(self, item: Any) -> Any:
        self._pauses = 0.0, 0
        return item

    def _pause(self) -> None:
        """Before a second try; longer when the samples before have failed too, and over when the loader closes."""
        waited, number = self._pauses
        seconds = min(_PAUSE_S * 2**number, _LONGEST_PAUSE_S, _PATIENCE_S - waited)
        self._pauses = waited + max(0.0, seconds), number + 1
        end = time.monotonic() + seconds
        while not self.stop.value and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))

    def _item(self, position: int) -> Any:
        if self.stop.value:
            raise Stopped
        index = self.index(position)
        seed_everything(key_of(Purpose.ITEM, self.order.seed, position))
        self.now.value = position
        try:
            return self.dataset[index]
        except _NOT_THE_SAMPLES_FAULT as error:
            error.add_note(f"while reading sample {index} (position {position})")
            raise
        finally:
            self.now.value = -1

    def _stand_in(self, chunk: Chunk, bad: tuple[BadSample, ...]) -> ReadChunk:
        tried = set() if chunk.is_dummy else set(chunk.positions)
        first, failures = bad[0] if bad else None, len(bad)
        for position in chunk.global_batch:
            if position in tried:
                continue
            item = self._read(position)
            if not isinstance(item, BadSample):
                return ReadChunk(self._collated([item], [position]), (position,), True, bad)
            first, failures = first or item, failures + 1
            if failures >= self._tries:
                break
        raise RecipeError(f"Dataset: none of {failures} samples of a global batch could be read; the first, {first}")

    def _collated(self, items: list[Any], positions: Sequence[int]) -> Any:
        try:
            return self.collate(items)
        except UnisonoError:
            raise
        except Exception as error:
            samples = ", ".join(str(self.index(position)) for position in positions[:32])
            which = f"samples {samples}{', …' if len(positions) > 32 else ''} (positions from {positions[0]} on)"
            if isinstance(error, _NOT_THE_SAMPLES_FAULT):
                error.add_note(f"while collating {which}")
                raise
            what = _shortened(f"{type(error).__name__}: {' '.join(str(error).split())}")
            raise RuntimeError(f"collate() failed on {which}: {what}") from error


def _shortened(text: str) -> str:
    return text if len(text) <= _ERROR_LENGTH else text[: _ERROR_LENGTH - 1] + "…"
