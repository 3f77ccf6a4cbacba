"""The sample order is a pure function: complete in every epoch, fast at any size, and divided among ranks."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.order import Order, num_micro_batches, share_of, split

SEEDS = st.integers(0, 2**63 - 1)
quick = settings(max_examples=60, deadline=None)


@quick
@given(size=st.integers(1, 5000), seed=SEEDS, epoch=st.integers(0, 10_000))
def test_every_epoch_contains_every_sample_exactly_once(size: int, seed: int, epoch: int) -> None:
    indices = Order(size, seed).indices(np.arange(epoch * size, (epoch + 1) * size))
    assert np.array_equal(np.sort(indices), np.arange(size))


@quick
@given(size=st.integers(20, 5000), seed=SEEDS, epoch=st.integers(0, 1000))
def test_each_epoch_and_each_seed_has_its_own_order(size: int, seed: int, epoch: int) -> None:
    here = np.arange(epoch * size, (epoch + 1) * size)
    this = Order(size, seed).indices(here)
    assert not np.array_equal(this, Order(size, seed).indices(here + size))
    assert not np.array_equal(this, Order(size, seed + 1).indices(here))
    assert not np.array_equal(this, np.arange(size))


@quick
@given(size=st.integers(1, 10**12), seed=SEEDS, positions=st.lists(st.integers(0, 10**15), min_size=1, max_size=50))
def test_numpy_and_torch_give_the_same_order(size: int, seed: int, positions: list[int]) -> None:
    order = Order(size, seed)
    by_numpy = order.indices(np.array(positions)).tolist()
    assert by_numpy == order.indices(torch.tensor(positions)).tolist()
    assert by_numpy == [order[position] for position in positions]
    assert all(0 <= index < size for index in by_numpy)


def test_a_shuffled_epoch_looks_random() -> None:
    size, epochs = 64, 4000
    first = Order(size, 7).indices(np.arange(epochs) * size)  # the first sample of each epoch
    expected = epochs / size
    chi_square = ((np.bincount(first, minlength=size) - expected) ** 2 / expected).sum()
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5
    neighbours = np.diff(Order(5000, 3).indices(np.arange(5000)))
    assert (neighbours == 1).sum() < 10  # a random order has about one such pair


def test_without_shuffling_samples_come_in_the_order_of_the_dataset() -> None:
    assert Order(5, 3, shuffle=False).indices(np.arange(12)).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_a_billion_samples_cost_no_memory() -> None:
    order = Order(10**9, 1)
    order[0]
    tracemalloc.start()
    result = order.indices(np.arange(5 * 10**9 - 1000, 5 * 10**9 + 1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(result[:1000].tolist())) == len(set(result[1000:].tolist())) == 1000
    assert peak < 2**20


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_epoch_of_a_position(seed: int) -> None:
    order = Order(7, seed)
    assert [order.epoch(position) for position in (0, 6, 7, 20, 21)] == [0, 0, 1, 2, 3]


@quick
@given(world=st.integers(1, 64), start=st.integers(0, 10**12), count=st.integers(0, 500))
def test_shares_of_the_ranks_make_up_the_global_batch(world: int, start: int, count: int) -> None:
    shares = [share_of(rank, world, start, count) for rank in range(world)]
    assert [position for share in shares for position in share] == list(range(start, start + count))
    assert {len(share) for share in shares} <= {count // world, -(-count // world)}


@quick
@given(world=st.integers(1, 16), count=st.integers(1, 300), micro_batch=st.integers(1, 40))
def test_micro_batches_make_up_a_share_and_are_as_many_on_every_rank(world: int, count: int, micro_batch: int) -> None:
    parts = num_micro_batches(count, world, micro_batch)
    seen: Counter[int] = Counter()
    for rank in range(world):
        micro_batches = split(share_of(rank, world, 0, count), parts)
        assert len(micro_batches) == parts
        assert max(map(len, micro_batches)) <= micro_batch
        assert max(map(len, micro_batches)) - min(map(len, micro_batches)) <= 1
        assert all(a.stop == b.start for a, b in pairwise(micro_batches))
        seen.update(position for part in micro_batches for position in part)
    assert seen == Counter(range(count))
