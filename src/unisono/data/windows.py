"""A shuffled order in which nearby positions read nearby samples.

A full shuffle reads every sample from another place, which is slow if samples lie in large files. In a windowed order,
an epoch first permutes blocks of consecutive samples, such as the shards of a dataset, and concatenates them. Then it
cuts this sequence into windows of equal size and permutes the samples of each window. So the positions of one window
touch only a few blocks, and each epoch puts other blocks into a window.

Like the full shuffle, this is a pure function of seed and position, and a permutation of the dataset in every epoch.
There is no shuffle buffer: a window costs no memory, so it may contain millions of samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np

from unisono.data.bits import Purpose, key_of, keys_for, mix
from unisono.data.permutation import invert, permute
from unisono.errors import RecipeError

_BLOCKS_PER_WINDOW = 16  # if the dataset does not define blocks
_POSITIVE = 2**63 - 1
_EPOCHS = 4  # number of epochs whose sequence of blocks is kept in memory

Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Windows:
    """How an epoch is shuffled in windows."""

    window: int  # samples per window
    starts: Array | None = field(default=None, compare=False)
    """Index of the first sample of each block; None: blocks of equal size, so memory does not depend on the dataset."""
    _layouts: dict[tuple[int, int, int], tuple[Array, Array]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def checksum(self) -> int:
        """A number that differs if the blocks differ, because the order depends on them; 0 without blocks."""
        return 0 if self.starts is None else crc32(self.starts.tobytes()) or 1

    def indices(self, offsets: Array, epochs: Array, size: int, seed: int) -> Array:
        """Returns the dataset indices at `offsets` within `epochs`, for a dataset of `size` samples."""
        offsets = self._within_windows(offsets, epochs, size, seed)
        # Shift the windows against the blocks, or the first samples of blocks would come early more often than others.
        offsets = (offsets + (keys_for(key_of(Purpose.ORDER, seed, 3), epochs) & _POSITIVE) % size) % size
        if self.starts is None:
            return self._in_equal_blocks(offsets, epochs, size, seed)
        indices = np.empty_like(offsets)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            begins, blocks = self._layout(epoch, size, seed)
            turns = np.searchsorted(begins, offsets[here], side="right") - 1
            indices[here] = self.starts[blocks[turns]] + offsets[here] - begins[turns]
        return indices

    def _within_windows(self, offsets: Array, epochs: Array, size: int, seed: int) -> Array:
        """Permutes offsets within their window; the last window of an epoch may be smaller than the others."""
        window = min(self.window, size)
        numbers = offsets // window
        keys = _keys_of_windows(keys_for(key_of(Purpose.ORDER, seed, 2), epochs), numbers)
        first = numbers * window
        shuffled = permute(offsets - first, window, keys)
        if rest := size % window:
            last = numbers == size // window
            if last.any():
                shuffled[last] = permute((offsets - first)[last], rest, keys[last])
        return first + shuffled

    def _in_equal_blocks(self, offsets: Array, epochs: Array, size: int, seed: int) -> Array:
        """Maps offsets in the sequence of permuted blocks to samples. Only the last block of the dataset is shorter."""
        each = -(-min(self.window, size) // _BLOCKS_PER_WINDOW)
        count = -(-size // each)
        keys = keys_for(key_of(Purpose.ORDER, seed, 1), epochs)
        missing = count * each - size
        turn_of_last = invert(np.full_like(offsets, count - 1), count, keys)
        after_last = offsets >= (turn_of_last + 1) * each - missing
        shifted = offsets + missing * after_last  # as if the last block were as long as the others
        turns = shifted // each
        indices: Array = permute(turns, count, keys) * each + shifted % each
        return indices

    def _layout(self, epoch: int, size: int, seed: int) -> tuple[Array, Array]:
        """Returns the blocks of an epoch in their order, and the offset at which each of them begins."""
        if (cached := self._layouts.get((epoch, size, seed))) is not None:
            return cached
        assert self.starts is not None
        count = len(self.starts)
        keys = keys_for(key_of(Purpose.ORDER, seed, 1), np.full(count, epoch, dtype=np.int64))
        blocks = permute(np.arange(count), count, keys)
        sizes = np.diff(self.starts, append=size)[blocks]
        while len(self._layouts) >= _EPOCHS:
            self._layouts.pop(next(iter(self._layouts)))
        return self._layouts.setdefault((epoch, size, seed), (np.cumsum(sizes) - sizes, blocks))


def _keys_of_windows(keys: Array, numbers: Array) -> Array:
    """Derives a key for each window from the key of its epoch."""
    with_number: Array = mix(keys ^ keys_for(0, numbers))
    return with_number


def windows_of(data: Any, window: int) -> Windows | None:
    """Returns the windows of a dataset for the setting shuffle_window; None if it is 0, which means a full shuffle.

    A dataset whose samples lie in blocks that are best read together has `block_starts`: the index of the first sample
    of each block, in ascending order.
    """
    if window == 0:
        return None
    starts: Any = getattr(data, "block_starts", None)
    if starts is None:
        return Windows(window)
    array = np.ascontiguousarray(starts, dtype=np.int64)
    size = len(data)
    is_valid = array.ndim == 1 and len(array) > 0 and array[0] == 0 and array[-1] < size
    if not is_valid or not bool((np.diff(array) > 0).all()):
        raise RecipeError(
            f"{type(data).__name__}.block_starts must begin with 0 and ascend to less than the {size} samples"
        )
    return Windows(window, array)


def remark_on_windows(windows: Windows | None, size: int) -> str | None:
    """Returns a note for the user if a window is so small that its samples come from one or two blocks."""
    if windows is None or windows.starts is None or len(windows.starts) < 2:
        return None
    mean = size // len(windows.starts)
    if windows.window >= 2 * mean:
        return None
    return (
        f"shuffle_window {windows.window}: a block of the dataset (a shard, a row group) has {mean:,} samples on "
        "average, so the samples of a batch come from one or two blocks; a window takes no memory, so use at least "
        f"{8 * mean}"
    )
