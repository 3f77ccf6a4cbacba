"""Losses that compare samples: any number of ranks and micro-batches gives the result of one large batch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import unisono
from many_runs import Copy, Outcome, Run, identical, largest_difference, many_runs
from recipes_for_tests import Pairs, PairsByRows, SentenceData, Sentences
from unisono.checkpoint.load import load_whole
from unisono.engine.start.registry import check_recipe
from unisono.engine.step.accumulate import Attempt
from unisono.engine.step.coupled import CoupledGradientAccumulator
from unisono.errors import ConfigError, RecipeError

BATCH = 14
EXACT = {
    "dtype": "float64",
    "global_batch_size": BATCH,
    "num_samples": 33,  # an epoch ends in the middle of a step
    "max_steps": 5,
    "save_every": 2,
    "keep_last": 9,
    "lr_schedule": "constant",
}
LAYOUTS = {
    f"{ranks} x {parts}{' by length' * by_length}{' fsdp' * (strategy == 'fsdp')}": (ranks, parts, by_length, strategy)
    for ranks in (1, 2, 3)
    for parts in (1, 4)
    for by_length in (False, True)
    for strategy in (("single",) if ranks == 1 else ("ddp", "fsdp"))
}
ONE = "1 x 1"
BY_ROWS = {f"{name} by rows": LAYOUTS[name] for name in ("1 x 1", "1 x 4", "2 x 1", "3 x 4", "3 x 1 by length fsdp")}
TORN = {"torn": "4,9", "max_bad_samples": 9}


def settings(ranks: int, parts: int, by_length: bool, strategy: str) -> dict[str, Any]:
    micro = -(-BATCH // (ranks * parts))
    return EXACT | {"batch_size": micro, "by_length": by_length, "strategy": strategy}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Runs with every layout, and with faults."""
    two = settings(2, 4, False, "ddp")
    run_list = [Run(name, name, layout[0], settings(*layout), recipe="Pairs") for name, layout in LAYOUTS.items()]
    one, few = settings(1, 4, False, "single"), {"num_samples": 2, "global_batch_size": 2}
    others = {
        "never guarded": (2, two | {"guard_steps": 0}),
        "out of memory": (2, two | {"inject": "oom@rank1:step2:forward"}),
        "out of memory later": (2, two | {"inject": "oom@rank0:step3:backward"}),
        "not a number": (2, two | {"inject": "nan@rank0:step2"}),
        "static graph": (2, two | {"static_graph": True}),
        "recomputed": (1, one | {"activation_checkpointing": True}),
        "torn 1": (1, one | TORN),
        "torn 2": (2, two | TORN),
        "dropout once": (1, one | {"dropout": 0.3}),
        "dropout again": (1, one | {"dropout": 0.3}),
        "few samples": (3, settings(3, 1, False, "ddp") | few),
        "few samples on one": (1, settings(1, 1, False, "single") | few),
    }
    run_list += [Run(name, name, world, each, recipe="Pairs") for name, (world, each) in others.items()]
    by_rows = {name: (layout[0], settings(*layout)) for name, layout in BY_ROWS.items()} | {
        "by rows, no room": (2, settings(2, 1, False, "ddp") | {"room": 4}),
        "by rows, not a number": (2, two | {"inject": "nan@rank1:step2"}),
        "by rows, torn": (2, two | TORN),
        "by rows, few samples": (3, settings(3, 1, False, "ddp") | few),
    }
    run_list += [Run(name, name, world, each, recipe="PairsByRows") for name, (world, each) in by_rows.items()]
    spoilt = two | {"inject": "nan@rank0:step2", "save_every": 1}
    run_list.append(Run("buffers", "buffers", 2, spoilt, recipe="PairsWithBuffers"))
    run_list.append(Run("went on", "went on", 3, settings(3, 1, False, "ddp"), Copy("2 x 4", 2), recipe="Pairs"))
    return many_runs(run_list, tmp_path_factory.mktemp("coupled"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_the_same_run(name: str, runs: dict[str, Outcome]) -> None:
    one, other = runs[ONE], runs[name]
    assert other.main.get("status") == "done", other.main
    assert len(one.losses()) == 5 and one.losses()[-1] < one.losses()[0]
    torch.testing.assert_close(other.losses(), one.losses(), rtol=0, atol=1e-10)
    assert largest_difference(one.weights(), other.weights()) < 1e-10


@pytest.mark.parametrize("name", LAYOUTS)
def test_only_one_micro_batch_keeps_its_graph(name: str, runs: dict[str, Outcome]) -> None:
    """A micro-batch has two graphs, one for each half of the sentences."""
    for rank in range(LAYOUTS[name][0]):
        assert int((runs[name].record / f"graphs.{rank}").read_text()) == 2


def test_with_one_micro_batch_nothing_is_computed_twice(runs: dict[str, Outcome]) -> None:
    assert len((runs[ONE].record / "train.0").read_text().splitlines()) == 5
    assert len((runs["1 x 4"].record / "train.0").read_text().splitlines()) == 5 * (4 + 3)


def test_metrics_are_those_of_the_whole_batch(runs: dict[str, Outcome]) -> None:
    for one, other in zip(runs[ONE].steps(), runs["3 x 4 by length fsdp"].steps(), strict=True):
        assert one["ids"] == other["ids"] and 0 < one["even"] == other["even"] < 1


@pytest.mark.parametrize(
    "name", ["went on", "never guarded", "out of memory", "out of memory later", "static graph", "recomputed"]
)
def test_faults_do_not_change_a_run(name: str, runs: dict[str, Outcome]) -> None:
    assert runs[name].main.get("status") == "done", runs[name].main
    torch.testing.assert_close(runs[name].losses(), runs[ONE].losses(), rtol=0, atol=1e-10)
    assert largest_difference(runs[ONE].weights(), runs[name].weights()) < 1e-10


def test_out_of_memory_is_recovered_with_smaller_micro_batches(runs: dict[str, Outcome]) -> None:
    assert len(runs["out of memory"].events("oom")) == len(runs["out of memory later"].events("oom")) == 1


def test_a_non_finite_step_is_skipped(runs: dict[str, Outcome]) -> None:
    skipped = [line["skipped"] for line in runs["not a number"].steps()]
    assert skipped == [0, 1, 1, 1, 1]  # so far


def test_a_skipped_coupled_step_does_not_change_buffers(runs: dict[str, Outcome]) -> None:
    passes = [int(runs["buffers"].weights(step)["passes"]) for step in range(1, 6)]
    assert passes[0] == passes[1] > 0 and passes[1] < passes[2] < passes[3] < passes[4]


def test_unreadable_samples_are_not_compared_with_others(runs: dict[str, Outcome]) -> None:
    one, two = runs["torn 1"], runs["torn 2"]
    torch.testing.assert_close(two.losses(), one.losses(), rtol=0, atol=1e-10)
    assert largest_difference(one.weights(), two.weights()) < 1e-10
    assert (one.losses() - runs[ONE].losses()).abs().max() > 1e-3


@pytest.mark.parametrize("name", [*BY_ROWS, "by rows, no room"])
def test_ranks_that_share_the_comparison_train_like_one_rank_that_does_all_of_it(
    name: str, runs: dict[str, Outcome]
) -> None:
    whole, shared = runs[ONE], runs[name]
    assert shared.main.get("status") == "done", shared.main
    torch.testing.assert_close(shared.losses(), whole.losses(), rtol=0, atol=1e-10)
    assert largest_difference(whole.weights(), shared.weights()) < 1e-10
    assert [(line["ids"], line["even"]) for line in shared.steps()] == [
        (line["ids"], line["even"]) for line in whole.steps()
    ]


@pytest.mark.parametrize("name", [name for name in BY_ROWS if "by length" not in name])
def test_a_rank_compares_its_share_of_the_rows_one_micro_batch_at_a_time(name: str, runs: dict[str, Outcome]) -> None:
    ranks, parts = LAYOUTS[name.removesuffix(" by rows")][:2]
    compared, largest = [], 0
    for rank in range(ranks):
        ranges = [json.loads(line) for line in (runs[name].record / f"anchors.{rank}").read_text().splitlines()]
        compared += [row for part in ranges[: len(ranges) // 5] for row in part]
        sizes = (runs[name].record / f"largest.{rank}").read_text().splitlines()
        largest = max([largest, *(json.loads(line)[0] for line in sizes)])
    assert compared == list(range(BATCH))
    assert largest == BATCH * -(-BATCH // (ranks * parts))


def test_running_out_of_memory_in_a_comparison_makes_its_ranges_smaller(runs: dict[str, Outcome]) -> None:
    assert len(runs["by rows, no room"].events("oom")) == 1
    anchors = (runs["by rows, no room"].record / "anchors.1").read_text().splitlines()
    assert [len(json.loads(line)) for line in anchors[:3]] == [7, 3, 4]


def test_faults_have_the_same_effect_on_a_shared_comparison_as_on_a_whole_one(runs: dict[str, Outcome]) -> None:
    assert [line["skipped"] for line in runs["by rows, not a number"].steps()] == [0, 1, 1, 1, 1]
    for name, whole in {"by rows, torn": "torn 1", "by rows, few samples": "few samples on one"}.items():
        torch.testing.assert_close(runs[name].losses(), runs[whole].losses(), rtol=0, atol=1e-10)
        assert largest_difference(runs[whole].weights(), runs[name].weights()) < 1e-10


def test_the_most_derived_class_decides_which_of_the_two_methods_is_called() -> None:
    """A class that overrides couple() of a recipe with couple_rows() would be ignored otherwise."""
    assert PairsByRows(PairsByRows.Config()).couples_by_rows
    assert not CouplesWhole(PairsByRows.Config()).couples_by_rows
    assert not Pairs(Pairs.Config()).couples_by_rows and not Sentences(Sentences.Config()).couples_by_rows


class CouplesWhole(PairsByRows):
    """Has a loss of its own."""

    def couple(self, rows: Any) -> Any:
        loss = super().couple(rows)
        return unisono.Loss(loss.total * 2, loss.count)


def test_rows_keep_their_dtype(tmp_path: Path) -> None:
    """If a boolean arrived as a number, `~` would give a wrong result."""
    AsGiven.found = {}
    unisono.train(AsGiven, batch_size=2, global_batch_size=4, max_steps=1, gpus="0", output_dir=str(tmp_path / "run"))
    assert AsGiven.found == {"even": torch.bool, "ids": torch.int64, "left": torch.float32, "right": torch.float32}


class AsGiven(Pairs):
    """Records the dtypes of rows."""

    found: ClassVar[dict[str, torch.dtype]] = {}

    def couple(self, rows: Any) -> Any:
        self.found.update({name: each.dtype for name, each in rows.items()})
        return super().couple(rows)


def test_running_out_of_memory_while_exchanging_rows_is_reported() -> None:
    """The other ranks wait for this rank's rows; continuing to the next agreement would leave them waiting."""
    gradient = CoupledGradientAccumulator.__new__(CoupledGradientAccumulator)

    def runs_out(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    gradient._gather = runs_out  # type: ignore[method-assign]
    gradient._strategy = SimpleNamespace(collective=True, guardable=True)  # type: ignore[assignment]
    with pytest.raises(torch.OutOfMemoryError):
        gradient._couple([], [], Attempt(guarded=True), False)


def test_dropout_is_the_same_in_both_passes(runs: dict[str, Outcome]) -> None:
    """Otherwise gradient and loss would belong to different rows; two runs of the same layout are bit-identical."""
    once, again = runs["dropout once"], runs["dropout again"]
    assert identical(once.weights(), again.weights())
    assert (once.losses() - runs[ONE].losses()).abs().max() > 1e-3


def test_a_rank_without_samples_joins_the_collectives(runs: dict[str, Outcome]) -> None:
    few, one = runs["few samples"], runs["few samples on one"]
    assert few.main.get("status") == "done", few.main
    torch.testing.assert_close(few.losses(), one.losses(), rtol=0, atol=1e-10)
    assert largest_difference(one.weights(), few.weights()) < 1e-10


def test_gradients_with_dropout_match_the_loss(tmp_path: Path) -> None:
    """With the same dropout, a small gradient step lowers the loss by the squared gradient norm times the rate."""
    common = {"global_batch_size": 12, "batch_size": 3, "num_samples": 12, "dropout": 0.4, "dtype": "float64"}
    common |= {"optimizer": "sgd", "beta1": 0.0, "weight_decay": 0.0, "grad_clip": 0.0, "lr_schedule": "constant"}
    common |= {"augment": False, "warmup_steps": 0, "gpus": "0", "noise": 0.0, "shuffle": False}
    rate, lines = 1e-6, []
    for number in range(2):
        folder = tmp_path / str(number)
        start = {"max_steps": 1, "learning_rate": rate}
        unisono.train(SameDropout, **common, **start, output_dir=str(folder))
        lines.append(json.loads((folder / "metrics.jsonl").read_text().splitlines()[0]))
        SameDropout.begin_with = load_whole(folder / "checkpoints" / "step_00000001", "model.")
    fell = lines[0]["loss"] - lines[1]["loss"]
    assert fell == pytest.approx(rate * lines[0]["grad_norm"] ** 2, rel=1e-3)


class SameDropout(Pairs):
    """Starts from trained weights."""

    begin_with: ClassVar[dict[str, torch.Tensor] | None] = None

    def model(self) -> Any:
        model = super().model()
        if self.begin_with is not None:
            model.double().load_state_dict(self.begin_with)
        return model


@dataclass
class _Config(Pairs.Config):
    flaw: str = ""
    """What is wrong."""


class Flawed(Pairs):
    """A recipe with one error."""

    Config = _Config

    def embed(self, model: Any, batch: Any, noise: Any) -> Any:
        rows = super().embed(model, batch, noise)
        flawed = {
            "list": list(rows.values()),
            "short": {"left": rows["left"][:1]},
            "scalar": {"left": rows["left"].sum()},
        }
        return flawed.get(self.config.flaw, rows)

    def couple(self, rows: Any) -> Any:
        loss = super().couple(rows)
        return {"number": loss.total, "detached": unisono.Loss(loss.total.detach(), 1)}.get(self.config.flaw, loss)


class WithoutEmbed(Pairs):
    """Defines only one of embed() and couple()."""

    embed = unisono.Recipe.embed


class Measured(Pairs):
    """Has evaluation data but no evaluate()."""

    evaluate = unisono.Recipe.evaluate

    def dataset(self, split: str) -> Any:
        return SentenceData(8, False)


@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        ("list", r"embed\(\) must return a mapping of tensors"),
        ("short", r"embed\(\): left is 1 rows for 4 samples"),
        ("scalar", r"embed\(\): left is a single number for 4 samples"),
        ("number", r"loss\(\) returned Tensor"),
        ("detached", r"total does not depend"),
    ],
)
def test_a_wrong_coupled_recipe_gets_a_clear_error(flaw: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=said):
        unisono.train(Flawed, flaw=flaw, batch_size=4, max_steps=1, gpus="0", output_dir=str(tmp_path / "run"))


def test_embed_and_couple_must_be_defined_together(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"has no embed\(\)"):
        unisono.train(WithoutEmbed, max_steps=1, gpus="0", output_dir=str(tmp_path / "run"))


def test_defining_only_couple_rows_is_enough_and_its_parameters_are_checked() -> None:
    class OnlyRows(Sentences):
        embed, couple_rows = Pairs.embed, PairsByRows.couple_rows

    check_recipe(OnlyRows)

    class OldParameters(OnlyRows):
        def couple_rows(self, rows: Any) -> Any:  # type: ignore[override]
            return None

    with pytest.raises(RecipeError, match=r"define couple_rows\(self, rows, start, stop\)"):
        check_recipe(OldParameters)


def test_a_coupled_recipe_must_define_its_evaluation(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"evaluate\(\)"):
        unisono.train(Measured, batch_size=4, max_steps=1, gpus="0", output_dir=str(tmp_path / "run"))


def test_a_coupled_step_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cuda_graph"):
        unisono.train(Pairs, batch_size=4, max_steps=1, gpus="0", cuda_graph=True, output_dir=str(tmp_path / "run"))
