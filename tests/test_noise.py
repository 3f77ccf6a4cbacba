"""Noise belongs to samples: a row depends on seed, position and draw number only, and passes tests of randomness."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unisono.data.noise import Noise

DRAWS = {
    "normal": lambda noise: noise.normal(4, 3),
    "uniform": lambda noise: noise.uniform(4, 3),
    "integers": lambda noise: noise.integers(-3, 1000, 4, 3),
}


def all_draws(seed: int, positions: list[int]) -> list[Tensor]:
    noise = Noise(seed, torch.tensor(positions))
    return [draw(noise) for draw in DRAWS.values()]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    positions=st.lists(st.integers(0, 2**50), min_size=1, max_size=12, unique=True),
    data=st.data(),
)
def test_a_row_is_the_same_in_any_batch(seed: int, positions: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(positions))))
    cut = data.draw(st.integers(0, len(positions)))
    whole = all_draws(seed, positions)
    for part in (order[:cut], order[cut:]):
        if part:
            for together, apart in zip(whole, all_draws(seed, [positions[i] for i in part]), strict=True):
                assert torch.equal(together[list(part)], apart)


def test_a_longer_padded_batch_has_the_same_numbers_at_the_same_positions() -> None:
    positions = torch.tensor([5, 8])
    assert torch.equal(Noise(1, positions).normal(9, 6)[:, :4], Noise(1, positions).normal(4, 6))


@pytest.mark.parametrize("name", DRAWS)
def test_rows_draws_and_seeds_differ(name: str) -> None:
    draw, positions = DRAWS[name], torch.arange(4)
    noise = Noise(0, positions)
    first, second = draw(noise), draw(noise)
    assert not torch.equal(first, second)
    assert not torch.equal(first, draw(Noise(1, positions)))
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first, draw(Noise(0, positions)))  # and the same again


def test_normal_draws_have_mean_0_variance_1_and_normal_tails() -> None:
    x = Noise(3, torch.arange(1000)).normal(1000, dtype=torch.float64)  # a million numbers: the errors are about 0.001
    assert abs(x.mean()) < 0.005 and abs(x.var() - 1) < 0.01
    assert abs((x**3).mean()) < 0.02 and abs((x**4).mean() - 3) < 0.05
    for bound, outside in ((1, 0.31731), (2, 0.04550), (3, 0.00270)):
        assert float((x.abs() > bound).double().mean()) == pytest.approx(outside, rel=0.06)
    assert abs(x.mean(0)).max() < 0.17 and abs(x.mean(1)).max() < 0.17  # no row or column deviates by more than 5 sigma


def test_uniform_numbers_fill_the_unit_interval_evenly() -> None:
    x = Noise(3, torch.arange(500)).uniform(500, dtype=torch.float64)
    assert x.min() >= 0 and x.max() < 1
    counts = torch.histc(x, bins=100, min=0, max=1)
    assert float(((counts - 2500) ** 2 / 2500).sum()) < 99 + 5 * (2 * 99) ** 0.5
    assert Noise(3, torch.arange(2000)).uniform(500).max() < 1  # float32 must not round up to 1


def test_neighbouring_rows_columns_and_draws_are_uncorrelated() -> None:
    noise = Noise(11, torch.arange(1000))
    x, y = noise.normal(1000, dtype=torch.float64), noise.normal(1000, dtype=torch.float64)
    for a, b in ((x[1:], x[:-1]), (x[:, 1:], x[:, :-1]), (x, y), (x, x.T), (x**2 - 1, y**2 - 1)):
        assert abs(float((a * b).mean())) < (0.005 if a is not x or b is not x.T else 0.006)
    far = Noise(11, torch.arange(1000) + 2**40).normal(1000, dtype=torch.float64)
    assert abs(float((x * far).mean())) < 0.005
    other_seed = Noise(12, torch.arange(1000)).normal(1000, dtype=torch.float64)
    assert abs(float((x * other_seed).mean())) < 0.005


@settings(max_examples=30, deadline=None)
@given(low=st.integers(-(2**31), 2**31), span=st.integers(1, 2**31 - 1), seed=st.integers(0, 2**32))
def test_integers_stay_in_their_range(low: int, span: int, seed: int) -> None:
    x = Noise(seed, torch.arange(50)).integers(low, low + span, 20)
    assert x.dtype == torch.int64 and low <= x.min() and x.max() < low + span


def test_integers_take_every_value_equally_often() -> None:
    x = Noise(5, torch.arange(1000)).integers(3, 10, 700)
    counts = torch.bincount(x.flatten(), minlength=10)
    assert counts[:3].sum() == 0
    assert (counts[3:] - 100_000).abs().max() < 5 * 100_000**0.5


def test_float32_and_float64_are_the_same_numbers_to_rounding() -> None:
    for method in ("normal", "uniform"):
        single = getattr(Noise(2, torch.arange(200)), method)(500, dtype=torch.float32)
        double = getattr(Noise(2, torch.arange(200)), method)(500, dtype=torch.float64)
        half = getattr(Noise(2, torch.arange(200)), method)(500, dtype=torch.bfloat16)
        assert single.dtype == torch.float32 and half.dtype == torch.bfloat16
        difference = (single.double() - double).abs()
        # Near 0, Box-Muller's radius sqrt(-2 log u) has the root of u's rounding in it: rarely more than 5e-6.
        assert difference.max() < 5e-4 and (difference > 5e-6).double().mean() < 1e-3
        assert torch.equal(half, single.bfloat16())


def test_noise_can_be_one_scalar_per_sample_or_have_no_shape() -> None:
    assert Noise(0, torch.arange(5)).normal().shape == (5,)
    assert Noise(0, torch.arange(5)).integers(0, 10).shape == (5,)
    assert Noise(0, torch.arange(5)).uniform(1).shape == (5, 1)
