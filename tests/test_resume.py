"""A run that resumes at any step, on any number of ranks, gives the result of a run that never stopped."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import unisono
from many_runs import Copy, Outcome, Run, identical, largest_difference, many_runs, selected, slow_unless
from recipes_for_tests import SentenceData
from tiny_recipe import Tiny
from unisono.data.order import Order

# 3 epochs of 15 samples in steps of 4: batches cross epochs, and the last one is a single sample.
STEPS, NUM_SAMPLES, EPOCHS = 12, 15, 3
RUN = {
    "global_batch_size": 4,
    "num_epochs": EPOCHS,
    "num_samples": NUM_SAMPLES,
    "save_every": 1,
    "keep_last": 0,
    "ema_decay": 0.9,
    "deterministic": True,
    "lr_schedule": "cosine",
    "warmup_steps": 3,
    "dropout": 0.0,
}
ONE, DDP, FSDP = {"strategy": "single"}, {"strategy": "ddp"}, {"strategy": "fsdp"}
DOUBLE = {"dtype": "float64"}
# name -> (world, settings) of an uninterrupted run and of its continuations, and the steps after which these begin.
# test_a_run_can_change_strategy_at_every_step stops after every step, between all strategies.
SAME_WORLD = {
    "1 rank": (1, ONE, range(1, STEPS)),
    "2 ranks ddp": (2, DDP | {"dropout": 0.2}, range(1, STEPS)),
    "3 ranks ddp": (3, DDP, (2, 7, 11)),
    "2 ranks fsdp": (2, FSDP, (1, 5, 11)),
    "3 ranks fsdp": (3, FSDP, (4,)),
}
OTHER_WORLD = {
    "1 to 2 ranks with workers": ("one, float64", 2, DDP | {"num_workers": 2}, (7,)),
    "1 to 2 ranks": ("one, float64", 2, DDP, (1, 4, 7, 11)),
    "2 to 1 rank": ("two, float64", 1, ONE, (2, 5, 8, 11)),
    "ddp on 2 to fsdp on 3 ranks": ("two, float64", 3, FSDP, (1, 6, 11)),
    "fsdp on 3 to ddp on 2 ranks": ("three fsdp, float64", 2, DDP, (1, 6, 11)),
    "fsdp on 3 to fsdp on 2 ranks": ("three fsdp, float64", 2, FSDP, (3, 8)),
    "fsdp on 3 to one device": ("three fsdp, float64", 1, ONE, (2, 7)),
}
SAME_CASES = [(name, step) for name, (_, _, steps) in SAME_WORLD.items() for step in steps]
OTHER_CASES = [(name, step) for name, (_, _, _, steps) in OTHER_WORLD.items() for step in steps]
# A run of `make test` resumes in the middle of an epoch, after the last step of one, and before the smaller last batch.
QUICK_STEPS = {"1 rank": (1, 4, 11), "2 ranks ddp": (4, 7, 11), "3 ranks ddp": (7,), "2 ranks fsdp": (5,)} | {
    "3 ranks fsdp": (4,),
    **{
        "1 to 2 ranks with workers": (7,),
        "1 to 2 ranks": (1,),
        "2 to 1 rank": (5, 11),
        "fsdp on 3 to one device": (7,),
    },
    **{
        "ddp on 2 to fsdp on 3 ranks": (6, 11),
        "fsdp on 3 to ddp on 2 ranks": (6,),
        "fsdp on 3 to fsdp on 2 ranks": (3,),
    },
}
QUICK_CASES = [(name, step) for name, steps in QUICK_STEPS.items() for step in steps]
OPTIMIZERS = ["sgd", "adam", "rmsprop", "nadam"]


def order_of_steps(first_step: int) -> list[list[int]]:
    """The samples of steps first_step + 1 to 12, computed from the order alone."""
    order = Order(NUM_SAMPLES, 0)
    end = NUM_SAMPLES * EPOCHS
    return [[order[p] for p in range(step * 4, min(step * 4 + 4, end))] for step in range(first_step, STEPS)]


def continuations(name: str, source: str, world: int, settings: dict[str, object], steps: object) -> list[Run]:
    return [Run(f"{name} @{k}", f"{name} @{k}", world, settings, Copy(source, k)) for k in steps]  # type: ignore[attr-defined]


def check_continuation(run: Outcome, whole: Outcome, step: int) -> None:
    assert run.main.get("status") == "done" and run.main["step"] == STEPS, run.main
    read, expected = run.read_ids(), order_of_steps(step)
    assert read[:-1] == expected[:-1]  # element by element
    assert set(read[-1]) == set(expected[-1])  # ranks without a sample compute the last one as a dummy
    assert [line["step"] for line in run.lines()] == list(range(1, STEPS + 1))
    for key in ("samples", "count", "lr", "ids", "squares"):
        assert [line[key] for line in run.steps()] == [line[key] for line in whole.steps()], key


@pytest.fixture(scope="module")
def same_world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    runs, cases = [], selected(request, "name", "step")
    for name, (world, settings, steps) in SAME_WORLD.items():
        runs.append(Run(name, name, world, RUN | settings))
        runs += continuations(name, name, world, settings, [step for step in steps if (name, step) in cases])
    return many_runs(runs, tmp_path_factory.mktemp("same_world"))


@pytest.fixture(scope="module")
def other_world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    cases = selected(request, "name", "step")
    runs = [
        Run("one, float64", "one, float64", 1, RUN | DOUBLE | ONE),
        Run("two, float64", "two, float64", 2, RUN | DOUBLE | DDP),
        Run("three fsdp, float64", "three fsdp, float64", 3, RUN | DOUBLE | FSDP),
    ]
    for name, (source, world, settings, steps) in OTHER_WORLD.items():
        runs += continuations(name, source, world, settings, [step for step in steps if (name, step) in cases])
    return many_runs(runs, tmp_path_factory.mktemp("other_world"))


@pytest.fixture(scope="module")
def various(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    even = {"global_batch_size": 5, "num_samples": 15, "ema_decay": 0.9, "deterministic": True}
    runs = [
        Run("five epochs", "five epochs", 2, even | {"num_epochs": 5}),
        Run("three epochs", "extended", 2, even | {"num_epochs": 3}),
        Run("five in the end", "extended", 2, {"num_epochs": 5}),
        Run("odd three epochs", "odd", 2, even | {"global_batch_size": 4, "num_epochs": 3}),
        Run("odd four in the end", "odd", 1, {"num_epochs": 4}),
        Run("nothing left", "nothing left", 1, {}, Copy("five epochs", 15)),
        Run("other flags", "other flags", 1, even | {"num_epochs": 1, "learning_rate": 3e-3, "keep_last": 2}),
        Run("flags kept", "other flags", 1, {"num_epochs": 2}),
        Run("other batch", "other flags", 1, {"num_epochs": 3, "global_batch_size": 6}),
        Run("other seed", "other flags", 1, {"num_epochs": 3, "seed": 5}),
    ]
    for name in OPTIMIZERS:
        settings = even | {"optimizer": name, "max_steps": 6, "save_every": 1, "keep_last": 0, "dtype": "float64"}
        runs.append(Run(name, name, 2, settings | DDP))
        runs += continuations(f"{name} again", name, 2, DDP, [3])
        runs += continuations(f"{name} on fsdp", name, 3, FSDP, [3])
        runs += continuations(f"{name} on one", f"{name} on fsdp @3", 1, ONE, [5])
    return many_runs(runs, tmp_path_factory.mktemp("various"))


@pytest.mark.parametrize(("name", "step"), slow_unless(SAME_CASES, QUICK_CASES))
def test_a_run_resumed_on_the_same_number_of_ranks_is_identical_bit_for_bit(
    same_world: dict[str, Outcome], name: str, step: int
) -> None:
    run, whole = same_world[f"{name} @{step}"], same_world[name]
    check_continuation(run, whole, step)
    assert run.losses().tolist() == whole.losses().tolist()
    assert identical(run.weights(prefix=""), whole.weights(prefix=""))  # weights, optimizer state and average


@pytest.mark.parametrize(("name", "step"), slow_unless(OTHER_CASES, QUICK_CASES))
def test_a_run_resumed_on_another_number_of_ranks_is_the_same_run(
    other_world: dict[str, Outcome], name: str, step: int
) -> None:
    run, whole = other_world[f"{name} @{step}"], other_world[OTHER_WORLD[name][0]]
    check_continuation(run, whole, step)
    assert float((run.losses() - whole.losses()).abs().max()) < 1e-10
    assert largest_difference(run.weights(prefix=""), whole.weights(prefix="")) < 1e-10


def test_the_whole_run_reads_every_sample_once_per_epoch(same_world: dict[str, Outcome]) -> None:
    read = [i for ids in same_world["1 rank"].read_ids() for i in ids]
    assert len(read) == NUM_SAMPLES * EPOCHS
    epochs = [read[start : start + NUM_SAMPLES] for start in range(0, len(read), NUM_SAMPLES)]
    assert all(sorted(epoch) == list(range(NUM_SAMPLES)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("name", SAME_WORLD)
def test_num_epochs_ends_at_the_last_sample_with_a_smaller_batch(same_world: dict[str, Outcome], name: str) -> None:
    last = same_world[name].steps()[-1]
    sample = Order(NUM_SAMPLES, 0)[44]
    assert (last["step"], last["samples"], last["epoch"]) == (12, 45, 3)
    assert last["count"] == len(SentenceData(NUM_SAMPLES, augment=False)[sample]["tokens"]) - 1


def test_a_finished_run_can_be_extended(various: dict[str, Outcome]) -> None:
    extended, whole = various["five in the end"], various["five epochs"]
    assert various["three epochs"].main["step"] == 9 and extended.main["step"] == 15
    assert identical(extended.weights(prefix=""), whole.weights(prefix=""))
    assert [line["step"] for line in extended.lines()] == list(range(1, 16))
    assert extended.losses().tolist() == whole.losses().tolist()


def test_extending_after_a_smaller_last_batch_continues_with_the_next_sample(various: dict[str, Outcome]) -> None:
    order = Order(NUM_SAMPLES, 0)
    read = [i for ids in various["odd four in the end"].read_ids() for i in ids]
    assert read == [order[position] for position in range(45, 60)]
    assert [line["samples"] for line in various["odd four in the end"].steps()][-5:] == [45, 49, 53, 57, 60]


def test_a_finished_run_started_again_does_nothing(various: dict[str, Outcome]) -> None:
    again, whole = various["nothing left"], various["five epochs"]
    assert again.main["status"] == "done" and again.main["step"] == 15
    assert identical(again.weights(prefix=""), whole.weights(prefix=""))
    assert [line["step"] for line in again.lines()] == list(range(1, 16))


def test_settings_of_the_first_start_are_kept(various: dict[str, Outcome]) -> None:
    run = various["flags kept"]
    assert run.main["step"] == 6
    assert {line["lr"] for line in run.steps()} == {3e-3}
    assert {line["samples"] - 5 * line["step"] for line in run.steps()} == {0}


@pytest.mark.parametrize(("name", "words"), [("other batch", "global_batch_size 6"), ("other seed", "seed 5")])
def test_another_effective_batch_or_seed_is_refused(various: dict[str, Outcome], name: str, words: str) -> None:
    assert various[name].main["exit_code"] == 2
    assert words in various[name].main["error"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_where_it_stopped(various: dict[str, Outcome], name: str) -> None:
    whole = various[name]
    assert identical(various[f"{name} again @3"].weights(prefix=""), whole.weights(prefix=""))
    for other in (f"{name} on fsdp @3", f"{name} on one @5"):
        assert various[other].main.get("step") == 6, various[other].main
        assert largest_difference(various[other].weights(prefix=""), whole.weights(prefix="")) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "world", "settings"),
    [
        ("single 1", 2, DDP),
        ("ddp 2", 1, ONE),
        ("ddp 2", 3, FSDP),
        ("ddp 2", 3, DDP),
        ("ddp 3", 3, DDP),
        ("fsdp 3", 1, ONE),
        ("fsdp 3", 2, FSDP),
        ("fsdp 3", 2, DDP),
        ("fsdp 3", 3, FSDP),
        ("ddp 3", 3, FSDP),
    ],
)
def test_a_run_can_change_strategy_at_every_step(
    tmp_path: Path, source: str, world: int, settings: dict[str, object]
) -> None:
    strategy, ranks = source.split()
    runs = [Run(source, source, int(ranks), RUN | DOUBLE | {"strategy": strategy})]
    runs += continuations("on", source, world, settings, range(1, STEPS))
    outcomes = many_runs(runs, tmp_path)
    for step in range(1, STEPS):
        run, whole = outcomes[f"on @{step}"], outcomes[source]
        check_continuation(run, whole, step)
        assert largest_difference(run.weights(prefix=""), whole.weights(prefix="")) < 1e-10


def test_a_start_without_a_folder_says_that_the_same_run_could_continue(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = iter(f"runs/tiny-20260101-00000{number}" for number in range(9))
    monkeypatch.setattr("unisono.engine.run_folder.new_folder.default_folder", lambda recipe: next(names))

    def said(**settings: Any) -> str:
        capfd.readouterr()
        unisono.train(Tiny, nproc=1, save_every=2, **{"max_steps": 4, **settings})
        return " ".join(capfd.readouterr().err.split())

    def is_told(words: str) -> bool:
        return "is an unfinished run with the same settings" in words

    assert not is_told(first := said())
    assert "done after step 4; to export its weights: unisono export runs/tiny-20260101-000000 FOLDER" in first
    assert not is_told(said())  # that run is done
    events = Path("runs/tiny-20260101-000001/events.jsonl")
    events.write_text("".join(line for line in events.read_text().splitlines(True) if '"done"' not in line))
    one = "runs/tiny-20260101-000001"
    assert f"{one} is an unfinished run with the same settings; to continue it: --output_dir {one}" in said()
    shutil.rmtree("runs/tiny-20260101-000002")
    assert not is_told(said(max_steps=6))  # another run
    assert not is_told(said(output_dir="elsewhere")) and not is_told(said(resume="never"))
    shutil.rmtree("runs/tiny-20260101-000004")
    lock = os.open(one, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert not is_told(said())  # that run is active
    os.close(lock)
    shutil.rmtree("runs/tiny-20260101-000005")
    Path(one, "run.json").write_text("{")
    assert not is_told(said())  # and a damaged run is ignored


def test_slow_phases_are_announced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any) -> None:
    class Slow(Tiny):
        def preview(self, model: Any, step: int) -> Any:
            time.sleep(0.5)
            return {"picture.txt": "drawn"}

    monkeypatch.setattr("unisono.engine.recorder._SLOW_S", 0.1)
    unisono.train(Slow, nproc=1, max_steps=2, preview_every=2, output_dir=str(tmp_path / "slow"))
    assert "step 2: drawing a preview" in capfd.readouterr().err
    unisono.train(Tiny, nproc=1, max_steps=2, preview_every=2, output_dir=str(tmp_path / "fast"))
    assert "drawing a preview" not in capfd.readouterr().err


def test_a_run_that_is_too_short_for_its_warm_up_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def said(folder: str = "run", **settings: Any) -> str:
        capfd.readouterr()
        unisono.train(Tiny, nproc=1, output_dir=str(tmp_path / folder), **settings)
        return " ".join(capfd.readouterr().err.split())

    assert "max_steps 999 is not reached: num_epochs 1 ends after " in said("short", max_steps=999, num_epochs=1)
    assert "warmup_steps 30: the run has 20 steps and never reaches its learning rate; use --warmup_steps 2" in said(
        max_steps=20, warmup_steps=30
    )
    one_epoch = said("one epoch", warmup_steps=999, max_steps=None)
    assert "steps, one epoch, and warmup_steps is 999" in one_epoch and "--max_steps or --num_epochs" in one_epoch
    done = "all steps of this run are done (max_steps is 20, num_epochs None)"
    assert done in said(num_epochs=None)
    longer = said(max_steps=21, warmup_steps=21)
    assert "are done" not in longer and "never reaches" not in longer and "not reached" not in longer
