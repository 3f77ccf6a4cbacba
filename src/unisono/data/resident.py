"""Supports datasets that are stored on the device.

If a dataset fits into the device's memory next to the model, samples need not be read one by one. A few operations on
the device gather a micro-batch by index. This needs no workers and no copies from the host, the step does not wait for
data, and the gathering can be part of a CUDA graph.
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

_MICRO_BATCHES_AHEAD = 64  # number of micro-batches whose sample order is copied to the device together
_MOST_AHEAD = 2**20  # maximum number of these positions


@runtime_checkable
class Resident(Protocol):
    """A map-style dataset that can gather whole batches."""

    def __len__(self) -> int:
        """Returns the number of samples."""

    def to(self, device: torch.device) -> Resident:
        """Returns the dataset with its data on `device`."""

    def gather(self, indices: Tensor) -> Any:
        """Returns the samples at `indices` ([batch], int64, on the data's device) as a batch."""


def is_resident(data: Any) -> TypeIs[Resident]:
    """Whether a dataset can gather whole batches. A tensor cannot, because its `gather` does something else."""
    return isinstance(data, Resident) and not isinstance(data, Tensor)


class Rows:
    """Samples of a resident dataset, gathered on demand."""

    def __init__(self, data: Resident, indices: Tensor, shape: Hashable = None) -> None:
        self._data, self.indices = data, indices
        self.shape = shape
        """The shape of the samples, if the dataset has several."""

    def to(self, *_: Any, **__: Any) -> Rows:
        """Returns itself, because the samples are already on the device."""
        return self

    def with_indices(self, indices: Tensor) -> Rows:
        """Returns the samples of the same dataset at other indices."""
        return Rows(self._data, indices, self.shape)

    def batch(self) -> Any:
        """Gathers the samples."""
        return self._data.gather(self.indices)


def gathered(data: Any) -> Any:
    """Returns `data` as a batch; if it is `Rows`, gathers the samples."""
    return data.batch() if isinstance(data, Rows) else data


class ResidentLoader:
    """Yields this rank's micro-batches of a resident dataset. Copies the sample order to the device well in advance."""

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
        """Returns the dataset indices of the samples at `positions` (a numpy array), on the device."""
        indices = torch.from_numpy(self._order.indices(positions))
        if self._device.type == "cuda":
            indices = indices.pin_memory()
        return indices.to(self._device, non_blocking=True)

    def close(self) -> None:
        """Ends the iteration."""
        self._chunks = iter(())
