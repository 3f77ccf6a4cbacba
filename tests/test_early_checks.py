"""All settings are checked before any work, so a run that cannot start encodes, draws and writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.tiny_recipe import Tiny

from unisono import Loss, train
from unisono.cli.main import main
from unisono.engine.checks import _check_best_metric, check_run
from unisono.engine.recipe import Work
from unisono.engine.start.registry import load_recipe
from unisono.engine.start.run import configure
from unisono.errors import ConfigError

WAN = ("train", "wan-flow", "--model_config", "tiny")
DISTILL = ("train", "wan-distill", "--teacher_path", "tiny")
WRONG = {
    "--optimizer adamm": "optimizer: expected one of adadelta",
    "--best_metric eval/los": "best_metric eval/los is not a metric of the evaluation",
    "--best_metric loss": "did you mean eval/loss?",
    "--best_metric eval/loss --eval_every -1": "best_metric eval/loss: with eval_every -1 nothing is evaluated",
    "--num_frames 10": "num_frames: expected 1, 5, 9, …, got 10; use 9 or 13",
    "--num_workers -1": "num_workers: expected at least 0",
    "--eval_levels 0": "eval_levels: expected at least 1, got 0",
}


@pytest.mark.parametrize("command", [WAN, DISTILL], ids=["wan-flow", "wan-distill"])
@pytest.mark.parametrize("flags", WRONG)
def test_print_config_rejects_what_training_would_reject(
    command: tuple[str, ...], flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *flags.split(), "--print_config"]) == 2
    seen = capsys.readouterr()
    assert WRONG[flags] in seen.err and not seen.out


@pytest.mark.parametrize("flags", WRONG)
def test_training_rejects_invalid_settings_before_anything_is_prepared(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepared(recipe: object, work: Work) -> None:
        pytest.fail("work was done before the settings were checked")

    kind = load_recipe("wan-flow")
    monkeypatch.setattr(kind, "prepare", prepared)
    assert main([*WAN, *flags.split(), "--gpus", "0", "--output_dir", str(tmp_path / "run")]) == 2
    assert WRONG[flags] in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("wan-flow", {"model_config": "tiny", "dataset_path": "."}),
        ("wan-distill", {"teacher_path": "tiny", "num_eval": 0}),
    ],
)
def test_a_best_metric_without_held_out_data_is_refused(recipe: str, settings: dict[str, object]) -> None:
    kind = load_recipe(recipe)
    check_run(kind, configure(kind, overrides=settings))
    resolved = configure(kind, overrides={**settings, "best_metric": "eval/loss"})
    with pytest.raises(ConfigError, match="best_metric eval/loss: there is no evaluation data"):
        check_run(kind, resolved)


class Accurate(Tiny):
    """A recipe whose metric names are known only after the first loss."""

    def dataset(self, split: str):  # type: ignore[no-untyped-def]
        return super().dataset("train")

    def loss(self, model, batch, noise):  # type: ignore[no-untyped-def]
        result = super().loss(model, batch, noise)
        return Loss(result.total, result.count, {"accuracy": torch.ones(())})


class NowAndThen(Accurate):
    """A recipe with a metric whose own count is 0 in some steps."""

    def loss(self, model, batch, noise):  # type: ignore[no-untyped-def]
        result = super().loss(model, batch, noise)
        return Loss(result.total, result.count, {"accuracy": (torch.ones(()), float(self.clock.step % 2))})


class Unheld(Accurate):
    def dataset(self, split: str):  # type: ignore[no-untyped-def]
        return super().dataset(split) if split == "train" else None


class Busy(Accurate):
    """Counts its steps."""

    steps = 0

    def loss(self, model, batch, noise):  # type: ignore[no-untyped-def]
        Busy.steps += 1
        return super().loss(model, batch, noise)


@pytest.fixture
def few_settings(tmp_path: Path) -> Iterator[dict[str, object]]:
    yield {"output_dir": str(tmp_path / "run"), "gpus": "0", "max_steps": 50, "num_workers": 0}


def test_a_users_recipe_with_a_wrong_best_metric_fails_in_its_first_step(few_settings: dict[str, object]) -> None:
    Busy.steps = 0
    with pytest.raises(ConfigError, match=r"eval/acc is not a metric of the evaluation \(eval/accuracy, eval/loss\)"):
        train(Busy, best_metric="eval/acc", **few_settings)
    assert Busy.steps <= 2  # the metrics of a step are read one step late
    assert not Path(str(few_settings["output_dir"])).exists()
    assert "eval/accuracy" in train(Accurate, best_metric="eval/accuracy", **few_settings).last


@pytest.mark.parametrize(
    ("name", "guess"), [("acc", "eval/accuracy"), ("eval/acuracy", "eval/accuracy"), ("eval/foo", "")]
)
def test_a_best_metric_unlike_all_others_gets_no_suggestion(name: str, guess: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _check_best_metric(name, ["colour", "accuracy", "loss"])
    assert str(caught.value).endswith(f"did you mean {guess}?" if guess else "(eval/accuracy, eval/colour, eval/loss)")


def test_a_best_metric_may_have_a_count_of_zero_in_some_steps(few_settings: dict[str, object]) -> None:
    settings = few_settings | {"max_steps": 5, "eval_every": 3}
    assert train(NowAndThen, best_metric="eval/accuracy", best_mode="max", **settings).last["eval/accuracy"] == 1.0


def test_a_users_recipe_without_held_out_data_has_no_best_metric(few_settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="there is no evaluation data"):
        train(Unheld, best_metric="eval/accuracy", **few_settings)
    assert not Path(str(few_settings["output_dir"])).exists()


def test_an_unknown_optimizer_is_rejected_before_data_is_prepared(few_settings: dict[str, object]) -> None:
    class Preparing(Accurate):
        def prepare(self, work: Work) -> None:
            pytest.fail("work was done before the settings were checked")

    with pytest.raises(ConfigError, match=r"optimizer: expected one of .*; got .adamm."):
        train(Preparing, optimizer="adamm", **few_settings)
