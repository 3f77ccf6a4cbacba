"""Data that lives on the device.

A data set small enough to lie beside the model is not read sample by sample: a micro-batch is gathered on the device,
by index, in a few operations. No workers, no copies from the host, nothing to wait for; and the gathering can be part
of a captured step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from unisono.data.cursor import Cursor
from unisono.data.loader import MicroBatch
from unisono.data.order import Order

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_MICRO_BATCHES_AHEAD = 64  # whose order goes to the device at once
_MOST_AHEAD = 2**20  # positions


@runtime_checkable
class Resident(Protocol):
    """A map-style data set that can gather whole batches."""

    def __len__(self) -> int:
        """How many samples there are."""

    def to(self, device: torch.device) -> Resident:
        """The data on `device`."""

    def gather(self, indices: Tensor) -> Any:
        """The samples at `indices` ([batch], int64, on the data's device) as a batch."""


def is_resident(data: Any) -> TypeIs[Resident]:
    """Whether a data set can gather whole batches; a tensor is a data set too, but its `gather` is something else."""
    return isinstance(data, Resident) and not isinstance(data, Tensor)


class Rows:
    """Samples of resident data that are gathered when they are needed."""

    def __init__(self, data: Resident, indices: Tensor, shape: Hashable = None) -> None:
        self._data, self.indices = data, indices
        self.shape = shape
        """Of the samples, where the data set has several: nothing else tells before they are gathered."""

    def to(self, *_: Any, **__: Any) -> Rows:
        """Itself: it is on the device already."""
        return self

    def with_indices(self, indices: Tensor) -> Rows:
        """Other samples of the same data."""
        return Rows(self._data, indices, self.shape)

    def batch(self) -> Any:
        """The samples."""
        return self._data.gather(self.indices)


def gathered(data: Any) -> Any:
    """The batch itself, where it is still to be gathered."""
    return data.batch() if isinstance(data, Rows) else data


class ResidentLoader:
    """This rank's micro-batches of data that is on the device; the order is sent there well ahead."""

    def __init__(self, data: Resident, order: Order, cursor: Cursor, device: torch.device) -> None:
        self._data, self._order, self._device = data, order, device
        self._chunks = cursor.chunks()
        most = max(1, min(cursor.global_batch, cursor.micro_batch * cursor.world))
        self._ahead = min(_MICRO_BATCHES_AHEAD * most, _MOST_AHEAD)
        self._first, self._indices = 0, torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> ResidentLoader:
        return self

    def __next__(self) -> MicroBatch:
        chunk = next(self._chunks)
        positions = chunk.positions
        return MicroBatch(chunk, Rows(self._data, self._at(positions), chunk.shape), positions, chunk.is_dummy)

    def _at(self, positions: Sequence[int]) -> Tensor:
        if not isinstance(positions, range):
            return self._sent(np.array(positions))
        begin, end = positions.start - self._first, positions.stop - self._first
        if begin < 0 or end > len(self._indices):
            ahead = np.arange(positions.start, max(positions.stop, positions.start + self._ahead))
            self._first, self._indices = positions.start, self._sent(ahead)
            begin, end = 0, len(positions)
        return self._indices[begin:end]

    def _sent(self, positions: Any) -> Tensor:
        """The indices of the samples at `positions` (a numpy array), on the device."""
        indices = torch.from_numpy(self._order.indices(positions))
        if self._device.type == "cuda":
            indices = indices.pin_memory()
        return indices.to(self._device, non_blocking=True)

    def close(self) -> None:
        """Ends the reading."""
        self._chunks = iter(())
