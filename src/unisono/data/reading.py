"""Reads the samples of a micro-batch, each with its own seed, and skips those that cannot be read.

If reading a sample raises, it is read once more with the same seed, after a short pause, because files on a network may
be unavailable for a moment. The pause grows while successive samples fail. If the second attempt raises too, the sample
is returned as a `BadSample`, and the micro-batch consists of the other samples. The loader does not decide what to do
about bad samples; all ranks decide that together.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
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
from unisono.formatting import shorten

_LOOK_AHEAD = 1024  # number of positions whose indices one numpy call computes, to amortise the overhead of the call
_ANNOUNCED = 2**14  # number of positions ahead whose indices a dataset with `will_read` gets, to fetch remote files
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0  # seconds before the second attempt
_MOST_PAUSES_S = 3.0  # maximum total of the pauses since the last readable sample; waiting longer does not help
_ERROR_LENGTH, _TRACEBACK_LINES = 300, 12
_MIN_SUBSTITUTES = 64  # number of samples to try before the whole dataset counts as unreadable
_NOT_THE_SAMPLES_FAULT = (MemoryError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be read in two attempts."""

    position: int
    index: int  # index in the dataset
    error: str  # the exception and its location, in one line
    traceback: str  # the last lines of the traceback

    def __str__(self) -> str:
        return f"sample {self.index} (position {self.position}): {self.error}"


class Stopped(BaseException):
    """Raised between two samples when the loader closes."""


class ReadChunk(NamedTuple):
    """The result of reading a chunk."""

    data: Any
    positions: Sequence[int]  # positions of the samples in `data`, in order
    is_dummy: bool
    bad: tuple[BadSample, ...]
    after: Any = None  # for a stream: its position after these samples


@dataclass
class LocalValue:
    """A number with the interface of multiprocessing's RawValue, for a reader in the training process."""

    value: int


class ChunkReader:
    """Reads the samples of a chunk and collates them."""

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], order: Order, max_bad_samples: int = 0
    ) -> None:
        self.dataset, self.collate, self.order = dataset, collate, order
        # After max_bad_samples + 1 failures the run ends anyway.
        self._most_failures = max(_MIN_SUBSTITUTES, max_bad_samples + 1)
        self._cached_indices: tuple[int, list[int]] = (0, [])  # first position, and the indices from that position on
        self._pauses = 0.0, 0  # seconds and number of pauses since the last readable sample
        self.now = LocalValue(-1)
        """The position that is being read, or -1. In a worker, it is in memory shared with the training process."""
        self.stop = LocalValue(0)
        """Nonzero if reading must stop. In a worker, it is in memory shared with the training process."""

    def __call__(self, chunk: Chunk) -> ReadChunk:
        """Reads a chunk without its bad samples.

        If the chunk has no readable sample, it gets another sample of the same global batch, with weight 0. A bad
        sample is reported only with its own chunk, so it is counted once across micro-batches and ranks.
        """
        if chunk.is_dummy:
            return self._substitute(chunk, ())
        items, positions, bad = [], [], []
        for position in chunk.positions:
            item = self._read(position)
            if isinstance(item, BadSample):
                bad.append(item)
            else:
                items.append(item)
                positions.append(position)
        if not items:
            return self._substitute(chunk, tuple(bad))
        return ReadChunk(self._collated(items, positions), positions if bad else chunk.positions, False, tuple(bad))

    def announce(self, chunk: Chunk) -> None:
        """Announces to a dataset with `about_to_read` the samples that follow those announced before."""
        if not chunk.is_dummy and callable(about_to_read := getattr(self.dataset, "about_to_read", None)):
            with suppress(Exception):  # reading reports the error
                about_to_read(self.order.indices(np.array(chunk.positions)).tolist())

    def index(self, position: int) -> int:
        """Returns the dataset index of the sample at `position`."""
        first, indices = self._cached_indices
        if not first <= position < first + len(indices):
            first, indices = position, self.order.indices(np.arange(position, position + _LOOK_AHEAD)).tolist()
            self._cached_indices = first, indices
            if callable(will_read := getattr(self.dataset, "will_read", None)):
                will_read(self.order.indices(np.arange(position, position + _ANNOUNCED)))
        return indices[position - first]

    def _read(self, position: int) -> Any:
        """Returns the sample at `position`, or a BadSample after two failures."""
        try:
            return self._good(self._item(position))
        except _NOT_THE_SAMPLES_FAULT:
            raise
        except Exception:
            pass  # retries outside of this block, because the exception's traceback keeps memory of this attempt alive
        self._pause()
        try:
            return self._good(self._item(position))
        except _NOT_THE_SAMPLES_FAULT:
            raise
        except Exception as error:
            one_line = " ".join("".join(traceback.format_exception_only(error)).split())
            lines = "".join(traceback.format_exception(error)).splitlines()
            text = f"{shorten(one_line, _ERROR_LENGTH)} ({tracebacks.location(error)})"
            return BadSample(position, self.index(position), text, "\n".join(lines[-_TRACEBACK_LINES:]))

    def _good(self, item: Any) -> Any:
        self._pauses = 0.0, 0
        return item

    def _pause(self) -> None:
        """Waits before a second attempt, longer if the previous samples failed too. Stops if the loader closes."""
        waited, number = self._pauses
        seconds = min(_PAUSE_S * 2**number, _LONGEST_PAUSE_S, _MOST_PAUSES_S - waited)
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

    def _substitute(self, chunk: Chunk, bad: tuple[BadSample, ...]) -> ReadChunk:
        """Reads another sample of the same global batch, in place of a chunk without readable samples."""
        tried = set() if chunk.is_dummy else set(chunk.positions)
        first, failures = bad[0] if bad else None, len(bad)
        for position in chunk.global_batch:
            if position in tried:
                continue
            item = self._read(position)
            if not isinstance(item, BadSample):
                return ReadChunk(self._collated([item], [position]), (position,), True, bad)
            first, failures = first or item, failures + 1
            if failures >= self._most_failures:
                break
        raise RecipeError(f"Dataset: none of {failures} samples of a global batch could be read; for instance {first}")

    def _collated(self, items: list[Any], positions: Sequence[int]) -> Any:
        try:
            return self.collate(items)
        except UnisonoError:
            raise
        except Exception as error:
            samples = ", ".join(str(self.index(position)) for position in positions[:32])
            which = f"samples {samples}{', …' if len(positions) > 32 else ''} (from position {positions[0]})"
            if isinstance(error, _NOT_THE_SAMPLES_FAULT):
                error.add_note(f"while collating {which}")
                raise
            reason = shorten(f"{type(error).__name__}: {' '.join(str(error).split())}", _ERROR_LENGTH)
            raise RuntimeError(f"collate() failed on {which}: {reason}") from error
