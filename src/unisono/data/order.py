"""The order in which a run reads its data.

A run reads one endless stream of samples. For a dataset of n samples, position p is in epoch p // n, and each epoch is
a different permutation of the whole dataset. So the seed and the position determine the sample. A checkpoint stores
only an integer, nothing is shuffled in memory, and every rank and worker computes the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from unisono.data.bits import Integers, Purpose, key_of, keys_for
from unisono.data.permutation import permute
from unisono.data.windows import Windows


@dataclass(frozen=True)
class Order:
    """The endless stream over a dataset, with `num_samples` samples per epoch."""

    num_samples: int
    seed: int
    shuffle: bool = True
    data_size: int | None = None
    """Size of the dataset if each epoch omits some samples (different ones in each epoch); None if it omits none."""
    windows: Windows | None = None
    """Windows in which the samples are shuffled; None: the whole dataset is shuffled at once."""

    def __getitem__(self, position: int) -> int:
        """Returns the dataset index of the sample at `position`."""
        return int(self.indices(np.array([position]))[0])

    def epoch(self, position: int) -> int:
        """Returns the epoch of `position`, counted from 0."""
        return position // self.num_samples

    def indices(self, positions: Integers) -> Integers:
        """Returns the dataset indices of the samples at `positions` (int64, numpy or torch on any device)."""
        offsets = positions % self.num_samples
        size = self.data_size or self.num_samples
        if not self.shuffle or size == 1:
            return offsets  # type: ignore[no-any-return]
        epochs = (positions - offsets) // self.num_samples
        if self.windows is not None:
            return self._windowed(self.windows, offsets, epochs, size)  # type: ignore[no-any-return]
        keys = keys_for(key_of(Purpose.ORDER, self.seed), epochs)
        return permute(offsets, size, keys)  # type: ignore[no-any-return]

    def _windowed(self, windows: Windows, offsets: Integers, epochs: Integers, size: int) -> Integers:
        if isinstance(offsets, torch.Tensor):
            on_host = windows.indices(offsets.cpu().numpy(), epochs.cpu().numpy(), size, self.seed)
            return torch.from_numpy(on_host).to(offsets.device)  # type: ignore[return-value]
        return windows.indices(offsets, epochs, size, self.seed)  # type: ignore[return-value]


@dataclass(frozen=True)
class Strides:
    """The number of samples in each step: a global batch, or fewer at an epoch's end if steps must not cross it."""

    global_batch: int
    epoch: int | None = None
    """Samples per epoch, if a step ends with its epoch; None if a step continues into the next epoch."""

    def end(self, start: int) -> int:
        """Returns the first position after the step that begins at `start`."""
        stop = start + self.global_batch
        return stop if self.epoch is None else min(stop, (start // self.epoch + 1) * self.epoch)

    def after(self, start: int, steps: int) -> int:
        """Returns the position after `steps` steps from `start`."""
        if self.epoch is None:
            return start + steps * self.global_batch
        epoch_end = (start // self.epoch + 1) * self.epoch
        left = -(-(epoch_end - start) // self.global_batch)
        if steps < left:
            return start + steps * self.global_batch
        epochs, rest = divmod(steps - left, -(-self.epoch // self.global_batch))
        return epoch_end + epochs * self.epoch + rest * self.global_batch

    def between(self, start: int, end: int) -> int:
        """Returns the number of steps from `start` until `end` is reached."""
        if end <= start:
            return 0
        if self.epoch is None:
            return -(-(end - start) // self.global_batch)
        epoch_end = (start // self.epoch + 1) * self.epoch
        first = -(-(min(end, epoch_end) - start) // self.global_batch)
        epochs, rest = divmod(max(0, end - epoch_end), self.epoch)
        return first + epochs * -(-self.epoch // self.global_batch) + -(-rest // self.global_batch)


def share_of(rank: int, world: int, start: int, count: int) -> range:
    """Returns the positions of a global batch that `rank` reads: one of `world` contiguous slices, in rank order."""
    return range(start + rank * count // world, start + (rank + 1) * count // world)


def split(positions: range, parts: int) -> list[range]:
    """Splits a rank's share into `parts` micro-batches whose sizes differ by at most one; some may be empty."""
    return [share_of(part, parts, positions.start, len(positions)) for part in range(parts)]


def num_micro_batches(count: int, world: int, micro_batch: int) -> int:
    """Returns the number of micro-batches per rank for a global batch of `count` samples.

    A micro-batch has at most `micro_batch` samples.
    """
    largest_share = -(-count // world)
    return -(-largest_share // micro_batch)
