"""The central promise: the number of ranks, micro-batches and workers and the strategy do not change a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from many_runs import Outcome, Run, identical, largest_difference, many_runs, selected, slow_unless
from recipes_for_tests import SentenceData
from unisono.data.order import Order, share_of

NUM_SAMPLES, GLOBAL_BATCH, STEPS = 29, 24, 10
WHOLE = {
    "global_batch_size": GLOBAL_BATCH,
    "batch_size": GLOBAL_BATCH,
    "max_steps": STEPS,
    "num_samples": NUM_SAMPLES,
    "ema_decay": 0.9,
}
# Not a multiple of 2 or 3, and the last batch of 2 samples leaves one of 3 ranks without any.
UNEVEN = {"global_batch_size": 7, "num_epochs": 2, "num_samples": 15, "batch_size": 7}

STRATEGIES = [(1, "ddp"), (1, "fsdp"), (2, "ddp"), (2, "fsdp"), (3, "ddp"), (3, "fsdp")]
ACCUMULATIONS = [1, 4]
IN_FLOAT32 = [(1, "ddp", 4), (2, "ddp", 1), (2, "ddp", 4), (2, "fsdp", 4), (3, "ddp", 4), (3, "fsdp", 1)]
# name -> world and settings, each to be compared with the same run on one device
VARIANTS = {
    "two loader workers": (2, {"strategy": "ddp", "num_workers": 2}),
    "activation checkpointing": (1, {"activation_checkpointing": True}),
    "activation checkpointing, 2 ranks fsdp": (2, {"strategy": "fsdp", "activation_checkpointing": True}),
    "static graph": (2, {"strategy": "ddp", "static_graph": True, "batch_size": 4}),
    "find unused parameters": (2, {"strategy": "ddp", "find_unused_parameters": True, "batch_size": 4}),
    "gradients outside the buckets": (2, {"strategy": "ddp", "gradient_as_bucket_view": False, "batch_size": 4}),
    "tiny buckets": (3, {"strategy": "ddp", "bucket_cap_mb": 0.001}),
    "deterministic": (3, {"strategy": "ddp", "deterministic": True, "batch_size": 5}),
    "weights kept gathered": (2, {"strategy": "fsdp", "fsdp_reshard_after_forward": False, "batch_size": 4}),
    "evaluations in between": (2, {"strategy": "fsdp", "num_eval": 5, "eval_every": 1}),
}
UNEVEN_VARIANTS = {
    "2 ranks ddp": (2, {"strategy": "ddp"}),
    "2 ranks fsdp": (2, {"strategy": "fsdp"}),
    "3 ranks ddp": (3, {"strategy": "ddp"}),
    "3 ranks ddp, one sample at a time": (3, {"strategy": "ddp", "batch_size": 1}),
    "3 ranks fsdp, one sample at a time": (3, {"strategy": "fsdp", "batch_size": 1}),
    "1 rank, micro-batches of 3": (1, {"strategy": "single", "batch_size": 3}),
    "3 ranks, two workers": (3, {"strategy": "ddp", "num_workers": 2}),
}


# `make test-slow` adds the others.
QUICK_LAYOUTS = [(1, "ddp", 4), (1, "fsdp", 1), (2, "ddp", 1), (2, "fsdp", 4), (3, "ddp", 4), (3, "fsdp", 1)]
UNSPLIT = [layout for layout in QUICK_LAYOUTS if layout[2] == 1]
QUICK_FLOAT32 = [layout for layout in QUICK_LAYOUTS if layout in IN_FLOAT32]
QUICK_VARIANTS = [
    *("two loader workers", "activation checkpointing, 2 ranks fsdp", "static graph", "find unused parameters"),
    *("gradients outside the buckets", "weights kept gathered", "evaluations in between"),
]
QUICK_UNEVEN = ["2 ranks fsdp", "3 ranks ddp", "3 ranks fsdp, one sample at a time", "1 rank, micro-batches of 3"]


def cut_up(world: int, strategy: str, accumulation: int) -> str:
    return f"{world} x {strategy} x {accumulation}"


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All runs of this module, by name; names of float32 runs end with a question mark."""
    root: Path = tmp_path_factory.mktemp("same_run")
    cases = {*UNSPLIT, *selected(request, "world", "strategy", "accumulation")}
    names = selected(request, "name")
    layouts: dict[str, tuple[int, dict[str, object]]] = {
        "one device": (1, WHOLE),
        "uneven": (1, UNEVEN),
        "few": (1, UNEVEN | {"global_batch_size": 2, "max_steps": 5}),
        "few, 3 ranks": (3, UNEVEN | {"global_batch_size": 2, "max_steps": 5, "strategy": "ddp"}),
        "another seed": (1, WHOLE | {"seed": 1}),
        "no noise": (1, WHOLE | {"noise": 0.0}),
        "no augmentation": (1, WHOLE | {"augment": False}),
        "dropout": (2, WHOLE | {"strategy": "ddp", "dropout": 0.3}),
        "dropout again": (2, WHOLE | {"strategy": "ddp", "dropout": 0.3, "num_workers": 2}),
    }
    layouts = {name: (world, settings | {"dtype": "float64"}) for name, (world, settings) in layouts.items()}
    for world, strategy in STRATEGIES:
        for accumulation in ACCUMULATIONS:
            name = cut_up(world, strategy, accumulation)
            settings = WHOLE | {"strategy": strategy, "batch_size": GLOBAL_BATCH // world // accumulation}
            if (world, strategy, accumulation) in cases:
                layouts[name] = (world, settings | {"dtype": "float64"})
            if (world, strategy, accumulation) in cases.intersection(IN_FLOAT32):
                layouts[name + "?"] = (world, settings)
    layouts["one device?"] = (1, WHOLE)
    for name, (world, settings) in VARIANTS.items():
        layouts[name] = (world, WHOLE | {"dtype": "float64"} | settings)
    for name, (world, settings) in UNEVEN_VARIANTS.items():
        layouts[name] = (world, UNEVEN | {"dtype": "float64"} | settings)
    unused = {*VARIANTS, *UNEVEN_VARIANTS} - names
    return many_runs([Run(name, name, *layout) for name, layout in layouts.items() if name not in unused], root)


def assert_same(run: Outcome, reference: Outcome) -> None:
    assert "error" not in run.main, run.main
    assert len(run.losses()) == len(reference.losses())
    assert float((run.losses() - reference.losses()).abs().max()) < 1e-10
    assert largest_difference(run.weights(), reference.weights()) < 1e-10
    for key in ("samples", "count", "lr"):
        assert [line[key] for line in run.steps()] == [line[key] for line in reference.steps()]
    for key in ("grad_norm", "ids", "squares", "epoch"):
        assert [line[key] for line in run.steps()] == pytest.approx([line[key] for line in reference.steps()], abs=1e-9)


@pytest.mark.parametrize(
    ("world", "strategy", "accumulation"),
    slow_unless([(*place, accumulation) for place in STRATEGIES for accumulation in ACCUMULATIONS], QUICK_LAYOUTS),
)
def test_ranks_and_accumulation_train_like_one_device(
    runs: dict[str, Outcome], world: int, strategy: str, accumulation: int
) -> None:
    run = runs[cut_up(world, strategy, accumulation)]
    assert_same(run, runs["one device"])
    assert largest_difference(run.weights(prefix="ema."), runs["one device"].weights(prefix="ema.")) < 1e-10
    # The batch really was split: in every step, each rank computed this many micro-batches.
    for rank in range(world):
        calls = (run.record / f"train.{rank}").read_text().splitlines()
        assert len(calls) == STEPS * accumulation
        assert {len(call.split(",")) for call in calls} == {GLOBAL_BATCH // world // accumulation}


@pytest.mark.parametrize(("world", "strategy", "accumulation"), slow_unless(IN_FLOAT32, QUICK_FLOAT32))
def test_float32_losses_agree_up_to_rounding(
    runs: dict[str, Outcome], world: int, strategy: str, accumulation: int
) -> None:
    run = runs[cut_up(world, strategy, accumulation) + "?"]
    assert len(run.losses()) == STEPS
    assert float((run.losses() - runs["one device?"].losses()).abs().max()) < 1e-5


@pytest.mark.parametrize("name", slow_unless(VARIANTS, QUICK_VARIANTS))
def test_a_switch_does_not_change_the_run(runs: dict[str, Outcome], name: str) -> None:
    assert_same(runs[name], runs["one device"])


@pytest.mark.parametrize("name", slow_unless(UNEVEN_VARIANTS, QUICK_UNEVEN))
def test_batches_that_do_not_divide_train_like_one_device(runs: dict[str, Outcome], name: str) -> None:
    assert_same(runs[name], runs["uneven"])
    assert [line["samples"] for line in runs[name].steps()] == [7, 14, 21, 28, 30]


def test_more_ranks_than_samples_train_like_one_device(runs: dict[str, Outcome]) -> None:
    assert_same(runs["few, 3 ranks"], runs["few"])


def test_counts_really_differ_from_rank_to_rank() -> None:
    """Otherwise a mean of means would pass everything above."""
    data, order = SentenceData(NUM_SAMPLES, augment=False), Order(NUM_SAMPLES, 0)
    counts = [
        [sum(len(data[order[position]]["tokens"]) for position in share_of(rank, 2, step * 24, 24)) for rank in (0, 1)]
        for step in range(STEPS)
    ]
    assert sum(a != b for a, b in counts) >= STEPS - 1


def test_each_rank_reads_its_share_of_the_order(runs: dict[str, Outcome]) -> None:
    order = Order(NUM_SAMPLES, 0)
    expected = [[order[step * 24 + place] for place in range(24)] for step in range(STEPS)]
    assert runs["one device"].read_ids() == expected
    for layout in UNSPLIT:
        assert runs[cut_up(*layout)].read_ids() == expected


@pytest.mark.parametrize("name", ["another seed", "no noise", "no augmentation", "dropout"])
def test_seed_noise_augmentation_and_dropout_do_change_the_run(runs: dict[str, Outcome], name: str) -> None:
    assert float((runs[name].losses() - runs["one device"].losses()).abs().max()) > 1e-4


def test_dropout_is_reproducible_at_one_world_size_with_any_number_of_workers(runs: dict[str, Outcome]) -> None:
    assert torch.equal(runs["dropout"].losses(), runs["dropout again"].losses())
    assert identical(runs["dropout"].weights(), runs["dropout again"].weights())


def test_the_loss_falls(runs: dict[str, Outcome]) -> None:
    losses = runs["one device"].losses()
    assert losses[-1] < losses[0] - 0.1
