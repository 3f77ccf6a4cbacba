"""`--cuda_graph` is only another way to launch kernels: a run that is recorded and replayed is the same run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command_line import TINY, losses
from command_line import unisono as command
from many_runs import Copy, Outcome, Run, identical
from ranks import run_ranks
from test_resident import Fit, FitOnDevice, Points
from unisono import Loss

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


class Waits(Fit):
    """Reads a number from the device in the middle of its loss."""

    def loss(self, model: nn.Module, batch: Points, noise: Any) -> Loss:
        loss = super().loss(model, batch, noise)
        return Loss(loss.total, loss.total.detach().item() * 0 + len(batch.x))


RECIPES = (Fit, FitOnDevice, Waits)
# 4 epochs of 29 samples in batches of 8: fourteen steps of one shape and a last step of 4. The model has dropout.
RUN = {"num_epochs": 4, "global_batch_size": 8, "batch_size": 8, "deterministic": True, "strategy": "single"}
RUN |= {"save_every": 1, "keep_last": 0, "eval_every": 5, "lr_schedule": "cosine", "warmup_steps": 3}
# name -> recipe, world, settings
WAYS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "float32": ("Fit", 1, {}),
    "data on the device": ("FitOnDevice", 1, {}),
    "bf16": ("FitOnDevice", 1, {"mixed_precision": "bf16"}),
    "fp16": ("Fit", 1, {"mixed_precision": "fp16"}),
    "average": ("Fit", 1, {"ema_decay": 0.9}),
    "accumulation": ("FitOnDevice", 1, {"batch_size": 4}),
    "sgd": ("Fit", 1, {"optimizer": "sgd"}),
    "a step that is skipped": ("FitOnDevice", 1, {"inject": "nan@rank0:step9"}),
    "out of memory": ("Fit", 1, {"inject": "oom@rank0:step9"}),
    "two ranks": ("FitOnDevice", 2, {"strategy": "ddp", "batch_size": 4, "guard_steps": -1}),
    "two ranks, accumulation": ("Fit", 2, {"strategy": "ddp", "batch_size": 2, "guard_steps": -1}),
}
GRAPH = {"cuda_graph": True}


def train_graphs(runs: list[dict[str, Any]], root: str) -> dict[str, Any]:
    """Runs in each rank: trains all runs; returns how often each replayed a recording."""
    import many_runs
    import recipes_for_tests

    replays = 0
    replay, train = torch.cuda.CUDAGraph.replay, many_runs._train

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        nonlocal replays
        replays += 1
        replay(graph)

    def train_and_count(*words: Any) -> dict[str, Any]:
        before = replays
        return train(*words) | {"replays": replays - before}

    torch.cuda.CUDAGraph.replay, many_runs._train = counted, train_and_count  # type: ignore[method-assign]
    for kind in RECIPES:
        setattr(recipes_for_tests, kind.__name__, kind)
    return many_runs.train_all(runs, root)


def outcomes(asked: Iterable[Run], root: Path) -> dict[str, Outcome]:
    asked = list(asked)
    args = {"runs": [asdict(run) for run in asked], "root": str(root)}
    # The ranks share one GPU, even if there are more.
    results = run_ranks("train_graphs", __file__, 2, args, env={"CUDA_VISIBLE_DEVICES": "0"})
    return {
        run.name: Outcome(root / run.folder, root / run.name, [results[rank][run.name] for rank in range(run.world)])
        for run in asked
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    run_list = []
    for name, (recipe, world, settings) in WAYS.items():
        run_list.append(Run(name, name, world, RUN | settings, recipe=recipe))
        run_list.append(Run(f"{name}, recorded", f"{name}, recorded", world, RUN | settings | GRAPH, recipe=recipe))
    for step in (2, 9):
        name = f"recorded, on from {step}"
        run_list.append(
            Run(name, name, 1, {"strategy": "single"}, Copy("data on the device, recorded", step), "FitOnDevice")
        )
    return outcomes(run_list, tmp_path_factory.mktemp("graphs"))


def same_bits(one: Outcome, other: Outcome) -> None:
    assert one.main.get("status") == other.main.get("status") == "done", (one.main, other.main)
    for key in ("loss", "grad_norm", "lr", "count", "samples", "skipped", "numbers"):
        assert [line[key] for line in one.steps()] == [line[key] for line in other.steps()], key
    assert len(one.steps()) == 15
    assert [line["eval/loss"] for line in one.evaluations()] == [line["eval/loss"] for line in other.evaluations()]
    assert identical(one.weights(prefix=""), other.weights(prefix=""))


@on_a_gpu
@pytest.mark.parametrize("name", WAYS)
def test_a_recorded_run_is_the_same_run_bit_for_bit(name: str, runs: dict[str, Outcome]) -> None:
    same_bits(runs[f"{name}, recorded"], runs[name])
    for outcome in runs[name].by_rank:
        assert outcome["replays"] == 0
    for outcome in runs[f"{name}, recorded"].by_rank:
        assert outcome["replays"] >= 8, "and it was recorded"


@on_a_gpu
@pytest.mark.parametrize("step", [2, 9])
def test_a_recorded_run_resumes_as_if_it_had_never_stopped(step: int, runs: dict[str, Outcome]) -> None:
    same_bits(runs[f"recorded, on from {step}"], runs["data on the device"])


@on_a_gpu
def test_steps_that_cannot_be_recorded_are_reported(tmp_path: Path) -> None:
    run_list = [
        Run("fsdp", "fsdp", 2, RUN | GRAPH | {"strategy": "fsdp"}, recipe="Fit"),
        Run("waits", "waits", 1, RUN | GRAPH, recipe="Waits"),
    ]
    found = outcomes(run_list, tmp_path)
    for outcome in found["fsdp"].by_rank:
        assert outcome["exit_code"] == 2
        assert outcome["error"].startswith("cuda_graph works with strategy single and ddp, not with fsdp")
    assert found["waits"].main["exit_code"] == 3
    error = found["waits"].main["error"]
    assert error.startswith("cuda_graph: this recipe's step cannot be recorded (") and ".item()" in error
    assert len(error.splitlines()) == 1


def test_without_a_gpu_a_note_is_printed_and_training_runs_as_usual(tmp_path: Path) -> None:
    ended = command("train", TINY, "--cuda_graph", "--nproc", 1, "--output_dir", "run", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert ended.err.count("cuda_graph: there is no GPU here; steps run as usual") == 1
    # Runs in a separate process, because CUDA cannot be hidden once this process has used it.
    assert command("train", TINY, "--nproc", 1, "--output_dir", "usual", cwd=tmp_path).code == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "usual") and len(losses(tmp_path / "run")) == 4
