"""The moving average of the weights is the same on any number of ranks and after restarts; training ignores it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from many_runs import Outcome, Run, identical, largest_difference, many_runs
from recipes_for_tests import Sentences

RUN = {"global_batch_size": 6, "num_samples": 20, "dtype": "float64", "ema_decay": 0.8, "num_eval": 5}
EVERY_STEP = {"save_every": 1, "keep_last": 0, "max_steps": 8}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    # Saving in between would hide stale weights, because it reshards them; and without resharding after the forward
    # pass, gathered weights survive one that no backward pass follows.
    evaluated = RUN | {"max_steps": 8, "save_every": 1000, "strategy": "fsdp", "eval_every": 1}
    long = RUN | {"max_steps": 12, "deterministic": True}
    return many_runs(
        [
            Run("whole", "whole", 2, long | {"strategy": "ddp"}),
            Run("first part", "moved", 2, long | {"max_steps": 4, "strategy": "ddp"}),
            Run("second part", "moved", 1, {"max_steps": 8}),
            Run("third part", "moved", 2, {"max_steps": 12, "strategy": "ddp"}),
            Run("every step", "every step", 1, RUN | EVERY_STEP),
            Run("no warm-up", "no warm-up", 1, RUN | EVERY_STEP | {"ema_warmup": False, "ema_decay": 0.95}),
            Run("fsdp 2", "fsdp 2", 2, RUN | EVERY_STEP | {"strategy": "fsdp"}),
            Run("fsdp 3", "fsdp 3", 3, RUN | EVERY_STEP | {"strategy": "fsdp", "eval_every": 1}),
            Run("ddp 3", "ddp 3", 3, RUN | EVERY_STEP | {"strategy": "ddp", "eval_every": 1}),
            Run("fsdp, evaluated", "fsdp, evaluated", 2, evaluated),
            Run("fsdp gathered", "fsdp gathered", 2, evaluated | {"fsdp_reshard_after_forward": False}),
            Run("no average", "no average", 1, RUN | EVERY_STEP | {"ema_decay": 0.0}),
            Run("off at first", "later", 1, RUN | {"ema_decay": 0.0, "max_steps": 3, "save_every": 1, "keep_last": 0}),
            Run("on later", "later", 2, {"ema_decay": 0.8, "max_steps": 6, "strategy": "fsdp"}),
            Run("off again", "later", 1, {"ema_decay": 0.0, "max_steps": 7}),
        ],
        tmp_path_factory.mktemp("ema"),
    )


def initial_weights() -> dict[str, Tensor]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Sentences(Sentences.Config()).model()
    torch.set_default_dtype(torch.float32)
    return {name: weight.detach() for name, weight in model.named_parameters()}


def average_by_hand(
    run: Outcome, start: dict[str, Tensor], steps: range, decay: float, warmup: bool = True
) -> dict[str, Tensor]:
    """The average of `start` and of the weights saved after each of `steps`."""
    average = start
    for step in steps:
        d = min(decay, step / (9 + step)) if warmup else decay
        average = {name: d * average[name] + (1 - d) * weight for name, weight in run.weights(step).items()}
    return average


def test_the_average_starts_at_the_initial_weights_and_follows_the_formula(runs: dict[str, Outcome]) -> None:
    for name, decay, warmup in (("every step", 0.8, True), ("no warm-up", 0.95, False)):
        expected = average_by_hand(runs[name], initial_weights(), range(1, 9), decay, warmup)
        assert largest_difference(runs[name].weights(prefix="ema."), expected) < 1e-10


def test_moving_from_2_to_1_to_2_ranks_keeps_the_average(runs: dict[str, Outcome]) -> None:
    moved, whole = runs["third part"], runs["whole"]
    assert moved.main["step"] == whole.main["step"] == 12
    assert largest_difference(moved.weights(prefix="ema."), whole.weights(prefix="ema.")) < 1e-10
    assert largest_difference(moved.weights(), whole.weights()) < 1e-10
    assert largest_difference(moved.weights(prefix="ema."), moved.weights()) > 1e-3


@pytest.mark.parametrize("name", ["fsdp 2", "fsdp 3", "ddp 3"])
def test_the_average_is_the_same_under_every_strategy(runs: dict[str, Outcome], name: str) -> None:
    for step in range(1, 9):
        ours, theirs = runs[name].weights(step, "ema."), runs["every step"].weights(step, "ema.")
        assert largest_difference(ours, theirs) < 1e-10


@pytest.mark.parametrize("name", ["fsdp, evaluated", "fsdp gathered"])
def test_evaluating_the_average_does_not_disturb_training(runs: dict[str, Outcome], name: str) -> None:
    assert len(runs[name].evaluations()) == 8
    assert len(runs["fsdp 2"].evaluations()) == 1
    assert runs[name].losses().tolist() == runs["fsdp 2"].losses().tolist()
    assert identical(runs[name].weights(prefix=""), runs["fsdp 2"].weights(prefix=""))


def test_evaluation_uses_the_average_under_every_strategy(runs: dict[str, Outcome]) -> None:
    losses = {
        name: [line["eval/loss"] for line in runs[name].evaluations()]
        for name in ("fsdp 3", "ddp 3", "fsdp, evaluated", "fsdp gathered")
    }
    assert losses["fsdp 3"] == pytest.approx(losses["ddp 3"], abs=1e-10)
    assert losses["fsdp 3"] == pytest.approx(losses["fsdp, evaluated"], abs=1e-10)
    assert losses["fsdp 3"] == pytest.approx(losses["fsdp gathered"], abs=1e-10)
    raw, averaged = runs["no average"].evaluations()[-1], runs["every step"].evaluations()[-1]
    assert averaged["eval/loss"] == pytest.approx(losses["ddp 3"][-1], abs=1e-10)
    assert abs(raw["eval/loss"] - averaged["eval/loss"]) > 1e-4


def test_the_average_does_not_change_training(runs: dict[str, Outcome]) -> None:
    assert runs["no average"].losses().tolist() == runs["every step"].losses().tolist()
    assert identical(runs["no average"].weights(), runs["every step"].weights())
    assert not runs["no average"].weights(prefix="ema.")


def test_the_average_can_be_switched_on_and_off_later(runs: dict[str, Outcome]) -> None:
    run = runs["on later"]
    assert [outcome.main.get("step") for outcome in (run, runs["off again"])] == [6, 7], run.main
    assert not run.weights(3, "ema.") and not run.weights(7, "ema.")
    expected = average_by_hand(run, run.weights(3), range(4, 7), 0.8)  # the average started from the current weights
    assert largest_difference(run.weights(6, "ema."), expected) < 1e-10
