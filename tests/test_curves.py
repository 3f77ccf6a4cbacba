"""Evaluation metrics that are curves: summed point by point over batches and ranks, stored as lists, restored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono
from many_runs import Outcome, Run
from ranks import run_ranks
from unisono import Loss, Recipe
from unisono.errors import RecipeError, TrainingFailed
from unisono.observe.report.write import write_report
from unisono.observe.trackers.numbers import curve_summaries

LENGTH = 4
SIZES = [1, 5]  # fewer than ranks, not divisible


class Curves(Recipe):
    """Fits a line; evaluated by curves whose true values are known."""

    defaults = {"num_workers": 0, "log_every": 1, "tensorboard": False, "batch_size": 2, "eval_batch_size": 2}

    @dataclass
    class Config:
        num_eval: int = 5
        """Samples to evaluate on."""
        flaw: str = ""
        """What is wrong with a curve."""
        record: str | None = None
        """Not used here."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def dataset(self, split: str) -> Any:
        return [float(number) for number in range(10 if split == "train" else self.config.num_eval)]

    def loss(self, model: nn.Module, batch: Tensor, noise: Any) -> Loss:
        x = batch.to(next(model.parameters()).dtype)[:, None]
        return Loss((model(x) - 2 * x).square().sum(), len(x))

    def evaluate(self, model: nn.Module, batch: Tensor, noise: Any) -> Mapping[str, Any]:
        points = batch.double()[:, None] + 10 * torch.arange(LENGTH)  # [batch, LENGTH]
        late = (batch >= 2).double()[:, None].expand(-1, LENGTH)
        actual = {
            "curve": (points.sum(0), len(batch)),
            "of_one": (batch.double().sum()[None], torch.tensor([len(batch)])),
            "by_point": ((points * late).sum(0), late.sum(0)),  # one count per point; 0 in some batches
            "number": (batch.sum(), len(batch)),
            "noisy": (noise.uniform(LENGTH, dtype=torch.float64).sum(0), len(batch)),
        }
        return {**actual, **FLAWS[self.config.flaw](batch)}

    def preview(self, model: nn.Module, step: int) -> Mapping[str, Any]:
        return {"evaluations.json": json.dumps(self.evaluations)}


FLAWS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "": lambda batch: {},
    "two dimensions": lambda batch: {"flawed": (torch.ones(2, 2), 1)},
    "counts of another length": lambda batch: {"flawed": (torch.ones(3), torch.ones(2))},
    "counts of a number": lambda batch: {"flawed": (1.0, torch.ones(2))},
    "another length in another batch": lambda batch: {"flawed": (torch.ones(2 + int(batch[0]) // 2), 1)},
    "a curve and then a number": lambda batch: {"flawed": (torch.ones(2) if batch[0] == 0 else torch.ones(()), 1)},
    "not a pair": lambda batch: {"flawed": torch.ones(2)},
}


def train_curves(runs: list[dict[str, Any]], root: str) -> dict[str, Any]:
    """Runs in each rank: trains the runs with the recipe of this file."""
    import many_runs
    import recipes_for_tests

    recipes_for_tests.Curves = Curves  # type: ignore[attr-defined]
    return many_runs.train_all(runs, root)


RUN = {"max_steps": 1, "global_batch_size": 4, "dtype": "float64"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    root = tmp_path_factory.mktemp("curves")
    run_list = [
        Run(f"{size} on {world}", f"{size} on {world}", world, RUN | {"num_eval": size}, recipe="Curves")
        for size in SIZES
        for world in (1, 2, 3)
    ]
    flaw = RUN | {"flaw": "another length in another batch", "eval_batch_size": 5}
    run_list += [
        # Each rank sees one batch; the difference between curves shows only across ranks.
        Run("flawed", "flawed", 2, flaw, recipe="Curves"),
        Run("best", "best", 2, RUN | {"best_metric": "eval/curve", "eval_every": 1, "max_steps": 2}, recipe="Curves"),
    ]
    results = run_ranks("train_curves", __file__, 3, {"runs": [asdict(run) for run in run_list], "root": str(root)})
    return {
        run.name: Outcome(root / run.folder, root / run.name, [results[rank][run.name] for rank in range(run.world)])
        for run in run_list
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_curve_is_the_mean_of_all_samples_point_by_point(runs: dict[str, Outcome], world: int, size: int) -> None:
    (line,) = runs[f"{size} on {world}"].evaluations()
    assert line["eval/curve"] == [(size - 1) / 2 + 10 * point for point in range(LENGTH)]
    assert line["eval/of_one"] == [(size - 1) / 2] and line["eval/number"] == (size - 1) / 2
    late = [number for number in range(size) if number >= 2]
    mean = sum(late) / len(late) if late else None
    assert line["eval/by_point"] == [0.0 if mean is None else mean + 10 * point for point in range(LENGTH)]
    assert line["eval/noisy"] == pytest.approx(runs[f"{size} on 1"].evaluations()[0]["eval/noisy"], abs=1e-15)


def test_curves_that_differ_between_ranks_are_refused(runs: dict[str, Outcome]) -> None:
    for outcome in runs["flawed"].by_rank:
        assert outcome["error"] == (
            "evaluate(): flawed was 2 points and 3 points; a curve must have the same length in every batch"
        )


def test_the_best_checkpoint_is_not_chosen_by_a_curve(runs: dict[str, Outcome]) -> None:
    for outcome in runs["best"].by_rank:
        assert (outcome["exit_code"], outcome["error"]) == (
            3,
            "best_metric eval/curve is a curve; choose a single number",
        )


@pytest.mark.parametrize("flaw", [flaw for flaw in FLAWS if flaw])
def test_a_metric_that_is_not_a_curve_is_rejected_by_name(flaw: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"evaluate\(\): flawed ") as caught:
        unisono.train(Curves, **RUN, flaw=flaw, output_dir=str(tmp_path / "run"))  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 1


def scalars(folder: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["scalars"])


def test_a_curve_is_three_charts_in_tensorboard_however_long_it_is(tmp_path: Path) -> None:
    result = unisono.train(Curves, **RUN, tensorboard=True, output_dir=str(tmp_path / "run"))  # type: ignore[arg-type]
    (written,) = (tmp_path / "run/tb").rglob("*tfevents*")
    assert {"eval/number", "loss"} <= (actual := scalars(written.parent))
    ends = {f"eval/{name}/{which}" for name in ("curve", "of_one") for which in ("first", "mean", "last")}
    assert {name for name in actual if "curve" in name or "of_one" in name} == ends
    long = [float(value) for value in range(1001)]
    assert curve_summaries({"eval/long": long, "eval/number": 0.0, "eval/none": []}) == {
        "eval/long/first": 0.0,
        "eval/long/mean": 500.0,
        "eval/long/last": 1000.0,
    }
    assert "eval/number" in result.last and "eval/curve" not in result.last, "the last word is numbers"


def evaluations(folder: Path, step: int) -> list[dict[str, Any]]:
    actual = json.loads((folder / f"previews/step_{step:08d}_evaluations.json").read_text())
    assert all(len(one["eval/curve"]) == LENGTH for one in actual)
    return actual  # type: ignore[no-any-return]


def test_after_a_resume_the_recipe_sees_each_earlier_evaluation_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = RUN | {"eval_every": 2, "save_every": 1, "preview_every": 0, "output_dir": str(folder)}
    settings |= {"max_steps": 5, "keep_last": 0}
    unisono.train(Curves, **settings)  # type: ignore[arg-type]
    first = evaluations(folder, 5)
    assert [one["step"] for one in first] == [2, 4, 5]

    unisono.train(Curves, **settings | {"max_steps": 8})  # type: ignore[arg-type]  # goes on
    longer = evaluations(folder, 8)
    assert [one["step"] for one in longer] == [2, 4, 5, 6, 8]
    assert [{name: one[name] for name in first[0]} for one in longer[:3]] == first, "and what they have found"

    for name in ("step_00000008", "step_00000007", "step_00000006", "step_00000005"):
        (folder / "checkpoints" / name).rename(folder / "checkpoints" / f"lost_{name}")
    unisono.train(Curves, **settings | {"max_steps": 6})  # type: ignore[arg-type]  # from step 4, again
    assert [one["step"] for one in evaluations(folder, 6)] == [2, 4, 6]

    unisono.train(Curves, **settings | {"resume": "never", "output_dir": str(tmp_path / "new")})  # type: ignore[arg-type]
    assert [one["step"] for one in evaluations(tmp_path / "new", 5)] == [2, 4, 5]


def test_restarting_a_finished_run_does_not_repeat_its_last_evaluation(tmp_path: Path) -> None:
    settings = RUN | {"eval_every": 2, "max_steps": 4, "output_dir": str(tmp_path / "run")}
    for _ in range(2):
        unisono.train(Curves, **settings)  # type: ignore[arg-type]
        assert [one["step"] for one in evaluations(tmp_path / "run", 4)] == [2, 4]
        lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "eval/curve" in line] == [2, 4]


class Fails(Curves):
    """The second evaluation fails once, after the checkpoint of its step was saved."""

    def evaluate(self, model: nn.Module, batch: Tensor, noise: Any) -> Mapping[str, Any]:
        if len(self.evaluations) == 1 and not Path(self.config.record).exists():  # type: ignore[arg-type]
            Path(self.config.record).touch()  # type: ignore[arg-type]
            raise TrainingFailed("not today")
        return super().evaluate(model, batch, noise)


def test_an_evaluation_that_failed_runs_once_after_the_restart(tmp_path: Path) -> None:
    settings = RUN | {"eval_every": 2, "save_every": 2, "max_steps": 6, "output_dir": str(tmp_path / "run")}
    settings |= {"record": str(tmp_path / "failed"), "async_save": False}
    with pytest.raises(TrainingFailed, match="not today"):
        unisono.train(Fails, **settings)  # type: ignore[arg-type]
    unisono.train(Fails, **settings)  # type: ignore[arg-type]
    assert [one["step"] for one in evaluations(tmp_path / "run", 6)] == [2, 4, 6]


# --- the beginning of a run


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_step_0_is_evaluated_once_even_after_restarts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Learning(Curves):
        def evaluate(self, model: nn.Module, batch: Tensor, noise: Any) -> Mapping[str, Any]:
            return {"weight": (next(model.parameters()).detach().double().sum() * len(batch), len(batch))}

    words: dict[str, Any] = {"output_dir": str(tmp_path), "eval_first": True, "tensorboard": True, "eval_every": 2}
    words |= {"best_metric": "eval/weight", "best_mode": "max"}
    unisono.train(Learning, **words, max_steps=3)
    evaluated = [line for line in logged(tmp_path) if "eval/weight" in line]
    assert [line["step"] for line in evaluated] == [0, 2, 3] and len({line["eval/weight"] for line in evaluated}) == 3
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))[0] != "step_00000000"
    seen = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [point.step for point in seen.Scalars("eval/weight")] == [0, 2, 3]

    unisono.train(Learning, **words, max_steps=5)
    assert [line["step"] for line in logged(tmp_path) if "eval/weight" in line] == [0, 2, 3, 4, 5]
    shutil.rmtree(tmp_path / "checkpoints")  # restarts at step 0, as after a kill before the first checkpoint
    unisono.train(Learning, **words, max_steps=2)
    assert [line["step"] for line in logged(tmp_path) if "eval/weight" in line] == [0, 2]
    assert "before training (step 0)" in write_report(tmp_path).read_text()


def test_a_default_warm_up_is_shortened_to_a_tenth_of_a_short_run_and_an_explicit_one_is_not(tmp_path: Path) -> None:
    class Warm(Curves):
        defaults = {**Curves.defaults, "warmup_steps": 100, "learning_rate": 0.5, "eval_every": -1}

    def rates(folder: str, **words: Any) -> list[float]:
        unisono.train(Warm, output_dir=str(tmp_path / folder), **words)
        return [line["lr"] for line in logged(tmp_path / folder)]

    assert rates("short", max_steps=20) == [0.25] + [0.5] * 19
    record = json.loads((tmp_path / "short/run.json").read_text())
    assert (record["config"]["warmup_steps"], record["sources"]["warmup_steps"]) == (2, "length")
    assert rates("short", max_steps=50) == [0.25] + [0.5] * 49, "a run that goes on keeps the warm-up it had"
    assert rates("explicit", max_steps=20, warmup_steps=100) == pytest.approx([0.005 * n for n in range(1, 21)])
    assert rates("long", max_steps=1000)[98:101] == pytest.approx([0.495, 0.5, 0.5]), "long enough for the default"
