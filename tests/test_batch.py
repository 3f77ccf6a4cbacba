"""The arithmetic of the effective batch, and flags that contradict each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.loader import Cursor
from unisono.engine.batch import BatchPlan, plan_batch
from unisono.errors import ConfigError
from unisono.settings import BatchSettings

sizes = st.integers(1, 64)
counts = st.integers(1, 16)


def plan(*explicit: str, devices: int = 1, asked: int | None = None, stored: int | None = None, **fields: int):
    """The plan for these fields, all of which count as set by the user unless `explicit` lists those that are."""
    named = explicit or tuple(fields)
    return plan_batch(
        BatchSettings(**fields), named.__contains__, devices=devices, requested_devices=asked, stored=stored
    )


def test_the_effective_batch_is_batch_size_times_devices_times_accumulation() -> None:
    assert plan(batch_size=8) == BatchPlan(8, 8, 1)
    assert plan(batch_size=8, devices=2) == BatchPlan(16, 8, 2)
    assert plan(batch_size=8, gradient_accumulation_steps=4, devices=2) == BatchPlan(64, 8, 2)
    assert plan(batch_size=8, gradient_accumulation_steps=4, devices=2).accumulation == 4


def test_accumulation_follows_from_the_global_batch_size() -> None:
    assert plan(batch_size=8, global_batch_size=64, devices=2) == BatchPlan(64, 8, 2)
    assert plan(batch_size=8, global_batch_size=64, devices=2).accumulation == 4
    assert plan(batch_size=8, global_batch_size=7, devices=3) == BatchPlan(7, 7, 3), "any number of ranks works"
    assert plan(batch_size=2, global_batch_size=7, devices=2).accumulation == 2


def test_accumulation_without_an_explicit_batch_size_sets_the_micro_batch() -> None:
    batch_plan = plan(global_batch_size=64, gradient_accumulation_steps=4, devices=2)
    assert (batch_plan.micro_batch, batch_plan.accumulation) == (8, 4)


def test_flags_that_contradict_each_other_are_refused_with_numbers_that_work() -> None:
    flags = {"batch_size": 2, "gradient_accumulation_steps": 2, "global_batch_size": 7}
    with pytest.raises(ConfigError) as refused:
        plan(devices=2, **flags)
    assert str(refused.value) == (
        "batch_size 2 x 2 devices x gradient_accumulation_steps 2 = 8 is not global_batch_size 7; remove one of them, "
        "or use global_batch_size 8 with gradient_accumulation_steps 2"
    )
    with pytest.raises(ConfigError, match="batch_size 2 x 1 device x"):
        plan(**flags)
    with pytest.raises(ConfigError, match="= 8 is not global_batch_size 7"):
        plan(devices=1, asked=2, **flags)


@given(batch_size=sizes, devices=counts, accumulation=counts, wanted=st.integers(1, 2000))
def test_the_values_that_an_error_suggests_work(batch_size: int, devices: int, accumulation: int, wanted: int) -> None:
    flags = {"batch_size": batch_size, "gradient_accumulation_steps": accumulation, "global_batch_size": wanted}
    try:
        batch_plan = plan(devices=devices, **flags)
    except ConfigError as error:
        words = str(error).split()
        better = {
            "global_batch_size": int(words[words.index("use") + 2]),
            "gradient_accumulation_steps": int(words[words.index("with") + 2]),
        }
        batch_plan = plan(devices=devices, **flags | better)
        assert batch_plan.global_batch == better["global_batch_size"]
        assert batch_plan.accumulation == better["gradient_accumulation_steps"]
    else:
        assert batch_plan.global_batch == wanted == batch_size * devices * accumulation


@given(batch_size=sizes, accumulation=counts, asked=counts, found=counts)
def test_fewer_devices_than_requested_keep_the_effective_batch(
    batch_size: int, accumulation: int, asked: int, found: int
) -> None:
    expected = plan(batch_size=batch_size, gradient_accumulation_steps=accumulation, devices=asked)
    got = plan(batch_size=batch_size, gradient_accumulation_steps=accumulation, devices=min(found, asked), asked=asked)
    assert got.global_batch == expected.global_batch
    assert got.micro_batch == expected.micro_batch


@given(
    batch_size=sizes, accumulation=counts | st.none(), devices=counts, before=counts, batch_before=sizes, more=counts
)
def test_a_resumed_run_keeps_its_effective_batch_on_any_number_of_devices(
    batch_size: int, accumulation: int | None, devices: int, before: int, batch_before: int, more: int
) -> None:
    stored = plan(batch_size=batch_before, gradient_accumulation_steps=more, devices=before).global_batch
    flags = {"batch_size": batch_size} | ({"gradient_accumulation_steps": accumulation} if accumulation else {})
    batch_plan = plan(devices=devices, stored=stored, **flags)
    assert batch_plan.global_batch == stored
    assert batch_plan.micro_batch <= batch_size, "batch_size caps the micro-batch"


def test_a_resumed_run_rejects_another_global_batch_size_only_if_the_user_set_it() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size 5 differs from this run's 8; .* remove the flag"):
        plan(global_batch_size=5, stored=8)
    assert plan("batch_size", global_batch_size=5, stored=8).global_batch == 8, "the recipe's default yields"
    assert plan(global_batch_size=8, stored=8).global_batch == 8


@given(batch=st.integers(1, 500), micro=sizes, devices=counts)
def test_the_plan_covers_every_sample_with_as_few_micro_batches_as_possible(
    batch: int, micro: int, devices: int
) -> None:
    batch_plan = BatchPlan(batch, min(micro, batch), devices)
    largest_share = -(-batch // devices)
    assert batch_plan.micro_batch * batch_plan.accumulation >= largest_share
    assert batch_plan.micro_batch * (batch_plan.accumulation - 1) < largest_share


@given(batch=st.integers(1, 200), micro=sizes, devices=counts)
def test_the_ranks_together_read_each_sample_of_a_step_once_in_the_planned_micro_batches(
    batch: int, micro: int, devices: int
) -> None:
    batch_plan = BatchPlan(batch, min(micro, batch), devices)
    samples: list[int] = []
    for rank in range(devices):
        cursor = Cursor(0, batch, batch_plan.global_batch, batch_plan.micro_batch, rank, devices)
        chunks = list(cursor.chunks())
        assert len(chunks) == batch_plan.accumulation, "every rank joins as many collectives as the others"
        assert all(len(chunk.positions) <= batch_plan.micro_batch for chunk in chunks)
        samples += [position for chunk in chunks if not chunk.is_dummy for position in chunk.positions]
    assert sorted(samples) == list(range(batch))
