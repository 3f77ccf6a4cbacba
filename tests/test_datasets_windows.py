"""The windowed order is a pure function, complete in every epoch, and keeps nearby positions in few blocks."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.order import Order
from unisono.data.permutation import invert, permute
from unisono.data.windows import Windows, remark_on_windows, windows_of
from unisono.errors import RecipeError

SEEDS = st.integers(0, 2**63 - 1)
quick = settings(max_examples=60, deadline=None)


class Blocks:
    """Something with a length and blocks."""

    def __init__(self, sizes: list[int]) -> None:
        self.size = sum(sizes)
        self.block_starts = np.cumsum([0, *sizes[:-1]])

    def __len__(self) -> int:
        return self.size


def starts(sizes: list[int]) -> np.ndarray:
    return np.cumsum([0, *sizes[:-1]])


@quick
@given(size=st.integers(1, 3000), window=st.integers(1, 4000), seed=SEEDS, epoch=st.integers(0, 10_000))
def test_every_epoch_contains_every_sample_exactly_once(size: int, window: int, seed: int, epoch: int) -> None:
    order = Order(size, seed, windows=Windows(window))
    indices = order.indices(np.arange(epoch * size, (epoch + 1) * size))
    assert np.array_equal(np.sort(indices), np.arange(size))


@quick
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=40), window=st.integers(1, 500), seed=SEEDS)
def test_blocks_of_any_size_are_complete_and_a_window_touches_few_of_them(
    sizes: list[int], window: int, seed: int
) -> None:
    size, first = sum(sizes), starts(sizes)
    order = Order(size, seed, windows=Windows(window, first))
    for epoch in range(3):
        indices = order.indices(np.arange(epoch * size, (epoch + 1) * size))
        assert np.array_equal(np.sort(indices), np.arange(size))
        blocks = np.searchsorted(first, indices, side="right") - 1
        for begin in range(0, size, window):
            touched = np.unique(blocks[begin : begin + window])
            assert len(touched) <= window // min(sizes) + 3
            whole = [
                block for block in touched if np.isin(np.flatnonzero(blocks == block) // window, begin // window).all()
            ]
            assert len(whole) >= len(touched) - 3  # the others continue in the window before or after it


@quick
@given(size=st.integers(2, 10**12), window=st.integers(1, 10**9), seed=SEEDS, data=st.data())
def test_one_position_equals_the_same_position_in_a_batch_in_numpy_and_torch(
    size: int, window: int, seed: int, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, 10**15), min_size=1, max_size=20))
    order = Order(size, seed, windows=Windows(window))
    together = order.indices(np.array(positions)).tolist()
    assert together == [order[position] for position in positions]
    assert together == order.indices(torch.tensor(positions)).tolist()
    assert all(0 <= index < size for index in together)


@quick
@given(size=st.integers(1, 5000), seed=SEEDS)
def test_invert_undoes_permute(size: int, seed: int) -> None:
    values, keys = np.arange(size), np.full(size, seed)
    assert np.array_equal(invert(permute(values, size, keys), size, keys), values)


def test_each_epoch_and_each_seed_has_another_order_and_other_blocks_in_a_window() -> None:
    first = starts([100] * 50)
    windows = Windows(1000, first)

    def window(seed: int, epoch: int) -> list[int]:
        return Order(5000, seed, windows=windows).indices(np.arange(epoch * 5000, epoch * 5000 + 1000)).tolist()

    orders = [window(seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    blocks = [frozenset(index // 100 for index in order) for order in orders]
    assert len(set(map(tuple, orders))) == len(set(blocks)) == 4
    assert all(len(each) in (10, 11) for each in blocks)
    assert np.abs(np.diff(orders[0]) == 1).sum() < 20  # samples of a block do not stay together
    assert window(1, 1) == orders[1]


def test_a_sample_is_at_every_place_equally_often() -> None:
    size, epochs = 60, 6000
    order = Order(size, 5, windows=Windows(12, starts([10] * 6)))
    indices = order.indices(np.arange(size * epochs)).reshape(epochs, size)
    for place in (0, 11, 12, 35, 59):
        counts = np.bincount(indices[:, place], minlength=size)
        expected = epochs / size
        assert ((counts - expected) ** 2 / expected).sum() < 59 + 5 * (2 * 59) ** 0.5


def test_an_epoch_that_omits_samples_omits_others_each_time() -> None:
    order = Order(90, 0, data_size=100, windows=Windows(20))
    epochs = [set(order.indices(np.arange(epoch * 90, (epoch + 1) * 90)).tolist()) for epoch in range(3)]
    assert all(len(epoch) == 90 for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("blocks", [None, 10_000])
def test_a_billion_samples_cost_no_memory(blocks: int | None) -> None:
    size = 10**9
    first = None if blocks is None else np.arange(0, size, size // blocks)
    order = Order(size, 1, windows=Windows(10**6, first))
    order[0]
    tracemalloc.start()
    result = order.indices(np.arange(5 * size - 1000, 5 * size + 1000))  # across the end of an epoch
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(result[:1000].tolist())) == len(set(result[1000:].tolist())) == 1000
    assert peak < 2**21
    assert np.array_equal(pickle.loads(pickle.dumps(order)).indices(np.arange(50)), order.indices(np.arange(50)))


def test_the_windows_of_a_dataset_follow_its_blocks() -> None:
    data = Blocks([10, 20, 30])
    assert windows_of(data, 0) is None
    windows = windows_of(data, 40)
    assert windows is not None and windows.starts is not None and windows.starts.tolist() == [0, 10, 30]
    assert windows_of(range(60), 40).checksum == 0 != windows.checksum
    assert windows_of(Blocks([20, 10, 30]), 40).checksum != windows.checksum
    assert remark_on_windows(windows, 60) is None
    assert "use at least 160" in str(remark_on_windows(windows_of(data, 39), 60))
    for bad in ([1, 2], [0, 0], [0, 60], [], [[0]]):
        data.block_starts = np.array(bad)
        with pytest.raises(RecipeError, match="block_starts"):
            windows_of(data, 40)
