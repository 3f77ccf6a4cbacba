"""Evaluation over ranks: every sample once, exact sums and torchmetrics, and the best checkpoint is kept."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import unisono
from command_line import TESTS
from command_line import unisono as command
from many_runs import Outcome, Run, many_runs, selected, slow_unless
from recipes_for_tests import SentenceData, Sentences
from unisono.data.bits import key_of
from unisono.data.noise import Noise

RUN = {"global_batch_size": 6, "num_samples": 20, "dtype": "float64", "max_steps": 2, "batch_size": 2}
SIZES = [1, 2, 7, 12]  # fewer than ranks, not divisible, divisible
PLACES = [(1, "single"), (2, "ddp"), (3, "ddp"), (3, "fsdp")]
LAYOUTS = [(*place, size) for place in PLACES for size in SIZES if size != 12 or place != (3, "fsdp")]
SEVEN = [(*place, 7) for place in PLACES]


def name_of(world: int, strategy: str, size: int) -> str:
    return f"{size} samples on {world} x {strategy}"


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    run_list = [
        Run(name_of(*layout), name_of(*layout), layout[0], RUN | {"strategy": layout[1], "num_eval": layout[2]})
        for layout in {*SEVEN, *selected(request, "world", "strategy", "size")}
    ]
    best = RUN | {"max_steps": 6, "num_eval": 7, "eval_every": 1, "keep_last": 1, "best_metric": "eval/loss"}
    run_list += [
        Run("whole batches", "whole batches", 1, RUN | {"num_eval": 7, "eval_batch_size": 7}),
        Run("workers", "workers", 2, RUN | {"num_eval": 7, "num_workers": 2, "strategy": "ddp"}),
        Run("best min", "best min", 2, best | {"strategy": "ddp"}),
        Run("best max", "best max", 2, best | {"best_mode": "max", "strategy": "fsdp"}),
        Run("best max goes on", "best max", 1, {"max_steps": 9}),
        Run("unknown metric", "unknown metric", 2, best | {"best_metric": "eval/nothing"}),
        Run("out of memory", "oom", 2, RUN | {"strategy": "ddp", "num_eval": 7, "inject": "oom@rank1:step2:evaluate"}),
        Run("by loss", "by loss", 1, RUN | {"num_eval": 7}, recipe="SentencesByLoss"),
        Run("by loss on 3", "by loss on 3", 3, RUN | {"num_eval": 7, "strategy": "ddp"}, recipe="SentencesByLoss"),
    ]
    return many_runs(run_list, tmp_path_factory.mktemp("evaluation"))


def metrics_of(run: Outcome) -> dict[str, float]:
    (line,) = run.evaluations()
    return {name: value for name, value in line.items() if name.startswith("eval/")}


def by_hand(run: Outcome, size: int) -> dict[str, float]:
    """All samples in one batch through the saved weights, in this process."""
    recipe = Sentences(Sentences.Config())
    model = recipe.model().double().eval()
    model.load_state_dict(run.weights())
    data = SentenceData(size, augment=False, first=1000)
    batch = recipe.collate([data[i] for i in range(size)])
    noise = Noise(key_of(5, 0), torch.arange(size))
    with torch.no_grad():
        strength = noise.uniform(1, dtype=torch.float64) * 0.3
        shift = strength * noise.normal(10, dtype=torch.float64)
        scores = model(batch["tokens"].clamp(min=0), batch["tokens"] != -1, batch["jitter"].double(), shift)[:, :-1]
    targets = batch["tokens"][:, 1:]
    real = targets != -1
    right = (scores.argmax(-1) == targets)[real].double().mean()
    return {
        "eval/loss": float(cross_entropy(scores[real], targets[real])),
        "eval/right": float(right),
        "eval/accuracy": float(right),
        "eval/mean_id": (size - 1) / 2,
        "eval/mean_square": sum(i * i for i in range(size)) / size,
    }


@pytest.mark.parametrize(
    ("world", "strategy", "size"), slow_unless(LAYOUTS, [*SEVEN, (3, "ddp", 1), (3, "fsdp", 2), (2, "ddp", 12)])
)
def test_metrics_are_those_of_all_samples_in_one_batch(
    runs: dict[str, Outcome], world: int, strategy: str, size: int
) -> None:
    if (strategy, size) == ("fsdp", 12):
        pytest.skip("covered by ddp")
    run = runs[name_of(world, strategy, size)]
    assert metrics_of(run) == pytest.approx(by_hand(run, size), abs=1e-6)  # torchmetrics divides in float32
    expected = by_hand(run, size)["eval/loss"]
    assert metrics_of(run)["eval/loss"] == pytest.approx(expected, abs=1e-10)
    assert all(outcome["metrics"]["eval/loss"] == run.main["metrics"]["eval/loss"] for outcome in run.by_rank)


@pytest.mark.parametrize(("world", "strategy"), PLACES)
def test_every_sample_is_evaluated_once_and_no_rank_is_idle(
    runs: dict[str, Outcome], world: int, strategy: str
) -> None:
    run = runs[name_of(world, strategy, 7)]
    (read,) = run.read_ids(micro_batches={1: 4, 2: 2, 3: 2}[world], split="eval")  # of at most 2 samples
    assert sorted(Counter(read)) == list(range(7))
    # Every rank computes the same number of batches; a rank without data computes a dummy batch, which does not count
    # (above).
    calls = [len((run.record / f"eval.{rank}").read_text().splitlines()) for rank in range(world)]
    assert len(set(calls)) == 1 and len(read) - 7 <= world


def test_batch_size_and_workers_do_not_change_the_metrics(runs: dict[str, Outcome]) -> None:
    expected = metrics_of(runs[name_of(1, "single", 7)])
    assert metrics_of(runs["whole batches"]) == pytest.approx(expected, abs=1e-10)
    assert metrics_of(runs["workers"]) == pytest.approx(expected, abs=1e-10)


def test_a_recipe_without_evaluate_is_evaluated_by_its_loss(runs: dict[str, Outcome]) -> None:
    metrics = metrics_of(runs["by loss"])
    assert set(metrics) == {"eval/loss", "eval/ids", "eval/squares"}
    assert metrics["eval/loss"] == pytest.approx(metrics_of(runs["whole batches"])["eval/loss"], abs=1e-10)
    assert metrics_of(runs["by loss on 3"]) == pytest.approx(metrics, abs=1e-10)


@pytest.mark.parametrize(("name", "choose"), [("best min", min), ("best max", max)])
def test_pruning_keeps_the_best_checkpoint_besides_the_newest(
    runs: dict[str, Outcome], name: str, choose: object
) -> None:
    lines = runs[name].evaluations()[:6]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    best = choose(lines, key=lambda line: line["eval/loss"])  # type: ignore[operator]
    if name == "best min":
        assert runs[name].saved_steps() == sorted({best["step"], 6})
        assert runs[name].state()["best"] == {"metric": "eval/loss", "value": best["eval/loss"], "step": best["step"]}
    else:  # it continued for 3 steps on one rank and still knows the best step
        lines = runs["best max goes on"].evaluations()
        best = max(lines, key=lambda line: line["eval/loss"])
        assert best["step"] < 9
        assert runs["best max goes on"].saved_steps() == sorted({best["step"], 9})
        assert runs["best max goes on"].state()["best"]["step"] == best["step"]


def test_an_unknown_best_metric_ends_the_run_and_lists_the_metrics(runs: dict[str, Outcome]) -> None:
    for outcome in runs["unknown metric"].by_rank:
        assert outcome["exit_code"] == 3
        assert "eval/nothing" in outcome["error"] and "eval/accuracy" in outcome["error"]


class Torn(SentenceData):
    """Data with some unreadable samples."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in (1, 2):  # batches are 0; 1, 2; 3, 4; 5, 6
            raise ValueError("torn")
        return super().__getitem__(index)


class TornSentences(Sentences):
    """Evaluated on data in which one whole batch, neither the first nor the last, is unreadable."""

    def dataset(self, split: str) -> SentenceData | None:
        return Torn(7, False, first=1000) if split == "eval" else super().dataset(split)


def test_an_unreadable_batch_does_not_affect_the_metrics(tmp_path: Path) -> None:
    result = unisono.train(TornSentences, **RUN, max_bad_samples=2, output_dir=str(tmp_path / "run"))  # type: ignore[arg-type]
    assert result.last["eval/mean_id"] == (0 + 3 + 4 + 5 + 6) / 5
    # The engine sums one metric; torchmetrics the other, which had seen samples before the dummy batch.
    assert result.last["eval/accuracy"] == pytest.approx(result.last["eval/right"], abs=1e-6)


def test_out_of_memory_in_an_evaluation_restarts_it_with_smaller_batches(runs: dict[str, Outcome]) -> None:
    run = runs["out of memory"]
    assert metrics_of(run) == pytest.approx(metrics_of(runs[name_of(2, "ddp", 7)]), abs=1e-6)
    calls = [json.loads(line) for line in (run.record / "eval.0").read_text().splitlines()]
    assert [len(ids) for ids in calls] == [1, 2, 1, 1, 1, 1]  # its three samples; then again one by one, and a dummy


def test_an_evaluation_that_fails_at_the_end_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "from torch import nn\n"
        "from tiny_recipe import Tiny\n"
        "class Fails(Tiny):\n"
        "    def model(self): return nn.Sequential(nn.Linear(1, 2000000), nn.Linear(2000000, 1))\n"  # kept temporarily
        "    def dataset(self, split): return super().dataset('train')\n"
        "    def evaluate(self, model, batch, noise): raise ValueError('no idea')\n"
    )
    paths = f"{TESTS}{os.pathsep}{TESTS.parent / 'src'}"
    ended = command("train", "fails.py:Fails", "--nproc", 1, "--output_dir", "run", cwd=tmp_path, PYTHONPATH=paths)
    assert ended.code == 3 and "no idea" in ended.err
    assert (tmp_path / "run" / "checkpoints" / "step_00000004" / "manifest.json").exists()
