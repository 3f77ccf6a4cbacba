"""Out of memory on one rank: no rank hangs, and the step is repeated in smaller micro-batches, with equal losses."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command_line import TINY, lines, losses, unisono
from many_runs import Copy, Outcome, Run, identical, largest_difference, many_runs, selected, slow_unless
from recipes_for_tests import Sentences
from tiny_recipe import Tiny
from unisono import Loss, train
from unisono.engine.batch import BatchPlan
from unisono.engine.memory.micro_batch_size import MicroBatchSizer, smaller
from unisono.engine.state import TrainState
from unisono.engine.step.guard import Guard
from unisono.engine.step.out_of_memory import OutOfMemoryTogether, is_out_of_memory
from unisono.faults import Injector, parse
from unisono.parallel.strategy import Placement
from unisono.settings import ParallelSettings

WHOLE = {"global_batch_size": 12, "max_steps": 6, "dtype": "float64", "save_every": 1, "keep_last": 0}
BITS = WHOLE | {"dtype": "float32", "deterministic": True, "dropout": 0.3}
DDP2, DDP3 = {"strategy": "ddp", "batch_size": 6}, {"strategy": "ddp", "batch_size": 4}
# name -> world, settings, fault
IN_PLACE = {
    "forward": (2, DDP2, "oom@rank1:step2:forward"),
    "backward": (2, DDP2, "oom@rank0:step2:backward"),
    "first step": (2, DDP2, "oom@rank1:step1:forward"),
    "both ranks": (2, DDP2, "oom@step3:backward"),
    "twice": (2, DDP2, "oom@rank1:step2:forward:x2"),
    "accumulating": (2, DDP2 | {"batch_size": 3}, "oom@rank1:step2:backward"),
    "3 ranks": (3, DDP3, "oom@rank2:step2:backward"),
    "gradients outside the buckets": (2, DDP2 | {"gradient_as_bucket_view": False}, "oom@rank1:step2:backward"),
    "one device": (1, {"strategy": "single", "batch_size": 12}, "oom@rank0:step2:backward"),
    "one device, reading": (1, {"strategy": "single", "batch_size": 12}, "oom@rank0:step2:data"),
    "ddp alone": (1, {"strategy": "ddp", "batch_size": 12}, "oom@rank0:step2:backward"),
    "two workers": (2, DDP2 | {"num_workers": 2}, "oom@rank1:step2:forward"),
}


QUICK = ["forward", "first step", "twice", "accumulating", "3 ranks", "one device", "two workers"]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    names = {"forward", *selected(request, "name")}
    root: Path = tmp_path_factory.mktemp("oom")
    run_list = {"undisturbed": Run("undisturbed", "undisturbed", 1, WHOLE | {"batch_size": 12})}
    for name, (world, settings, fault) in IN_PLACE.items():
        if name not in names:
            continue
        run_list[name] = Run(name, name, world, WHOLE | settings | {"inject": fault})
    small = {"micro_batch": 3}
    run_list |= {
        "small from the start": Run("small from the start", "small", 2, BITS | DDP2 | small),
        "became small": Run("became small", "became", 2, BITS | DDP2 | {"inject": "oom@rank1:step1:backward"}),
        "3 small": Run("3 small", "3small", 3, BITS | DDP3 | {"micro_batch": 2}),
        "3 became small": Run("3 became small", "3became", 3, BITS | DDP3 | {"inject": "oom@rank1:step1:forward"}),
        "always guarded": Run("always guarded", "guarded", 3, BITS | DDP3 | {"guard_steps": -1}),
        "never guarded": Run("never guarded", "unguarded", 3, BITS | DDP3 | {"guard_steps": 0}),
        "buffers": Run("buffers", "buffers", 2, WHOLE | DDP2 | small, recipe="SentencesWithBuffers"),
        "buffers, again": Run(
            "buffers, again",
            "buffers2",
            2,
            WHOLE | DDP2 | {"inject": "oom@rank1:step1:backward"},
            recipe="SentencesWithBuffers",
        ),
        "gone on": Run("gone on", "gone", 1, WHOLE | {"max_steps": 8, "batch_size": 6}, Copy("forward", 6)),
        "too big": Run("too big", "big", 2, WHOLE | DDP2 | {"inject": "oom@rank1:step2:x9"}),
        "auto": Run(
            "auto",
            "auto",
            2,
            WHOLE
            | DDP2
            | {
                "micro_batch": "auto",
            },
        ),
    }
    return many_runs(list(run_list.values()), root)


@pytest.mark.parametrize("name", slow_unless(IN_PLACE, QUICK))
def test_the_same_samples_are_repeated_in_smaller_micro_batches(runs: dict[str, Outcome], name: str) -> None:
    one, run = runs["undisturbed"], runs[name]
    assert largest_difference(run.weights(), one.weights()) < 1e-12
    torch.testing.assert_close(run.losses(), one.losses(), rtol=1e-12, atol=0)
    _, settings, fault = IN_PLACE[name]
    (event, *more) = run.events("oom")
    share = int(settings["batch_size"])  # type: ignore[call-overload]
    assert event["in_place"] and event["micro_batch"] == -(-share // 2) and len(more) == ("x2" in fault)
    assert run.state()["micro_batch"] == [event, *more][-1]["micro_batch"]
    assert run.state()["memory_failures"] == 1 + len(more)


@pytest.mark.parametrize(("before", "after"), [("small from the start", "became small"), ("3 small", "3 became small")])
def test_a_replayed_step_equals_one_with_small_micro_batches_bit_for_bit(
    runs: dict[str, Outcome], before: str, after: str
) -> None:
    assert identical(runs[before].weights(), runs[after].weights())  # with dropout: random state was restored
    assert runs[before].losses().tolist() == runs[after].losses().tolist()


def test_guarded_and_fast_steps_agree_bit_for_bit(runs: dict[str, Outcome]) -> None:
    assert identical(runs["always guarded"].weights(), runs["never guarded"].weights())


def test_a_replay_starts_with_the_buffers_from_before_the_attempt(runs: dict[str, Outcome]) -> None:
    assert identical(runs["buffers"].weights(), runs["buffers, again"].weights())
    assert runs["buffers"].weights()["passes"] == 2 * 6  # two micro-batches in each of six steps


def test_a_run_keeps_the_micro_batch_size_that_fits(runs: dict[str, Outcome]) -> None:
    run = runs["gone on"]
    assert run.main["step"] == 8
    assert run.state()["micro_batch"] == 3
    read = [json.loads(line) for line in (run.record / "train.0").read_text().splitlines()]
    assert max(len(ids) for ids in read) == 3


def test_if_not_even_one_sample_fits_all_ranks_report_the_missing_memory(runs: dict[str, Outcome]) -> None:
    for ended in runs["too big"].by_rank:
        assert ended["exit_code"] == 3
        assert "even one sample does not fit on rank 1" in ended["error"]
        for word in ("activation_checkpointing", "fsdp on 2 GPUs", "fsdp_cpu_offload", "KiB"):
            assert word in ended["error"]


def test_auto_runs_its_trials_before_the_first_step_and_does_not_change_the_run(runs: dict[str, Outcome]) -> None:
    run = runs["auto"]
    (result,) = run.events("micro_batch")
    assert result["micro_batch"] == 6 and result["trials"] == 4  # 1, 2, 4, 6
    assert largest_difference(run.weights(), runs["undisturbed"].weights()) < 1e-12


@pytest.mark.parametrize(("limit", "expected"), [(1, 1), (3, 3), (7, 7), (20, 20), (37, 36), (64, 64), (1000, 64)])
def test_the_largest_size_that_fits_is_found_in_a_few_trials(tmp_path: Path, limit: int, expected: int) -> None:
    state = TrainState(64)
    sizing = MicroBatchSizer(BatchPlan(64, 8, 1), state, tmp_path, may_rise=True, largest=64)

    def try_out(plan: BatchPlan) -> None:
        if plan.micro_batch > limit:
            raise OutOfMemoryTogether("full")

    assert sizing.find(try_out) <= 10
    assert state.micro_batch == sizing.plan.micro_batch == expected


def test_the_micro_batch_grows_only_with_auto_and_less_often_after_each_failure(tmp_path: Path) -> None:
    def steps_until_it_rises(may_rise: bool, failures: int) -> int | None:
        state = TrainState(64, micro_batch=4, memory_failures=failures)
        sizing = MicroBatchSizer(BatchPlan(64, 4, 1), state, tmp_path, may_rise=may_rise, largest=64)
        for state.step in range(2000):
            if sizing.rise():
                assert sizing.plan.micro_batch == state.micro_batch == 8
                return state.step
        return None

    first, later = steps_until_it_rises(True, 0), steps_until_it_rises(True, 2)
    assert first is not None and later is not None and later >= 2 * first
    assert steps_until_it_rises(False, 0) is None


def test_a_size_that_made_a_restart_necessary_is_not_tried_again_at_once(tmp_path: Path) -> None:
    # The checkpoint stores a size that fits; the attempt after it ran out of memory where only a restart helps.
    state = TrainState(64, step=900, micro_batch=16, memory_step=100)
    sizing = MicroBatchSizer(BatchPlan(64, 8, 1), state, tmp_path, may_rise=True, largest=64)
    assert (state.micro_batch, state.memory_failures, state.memory_step) == (8, 1, 900)
    assert not sizing.rise()
    # More ranks have smaller shares, so this says nothing about memory.
    state = TrainState(64, step=900, micro_batch=16, memory_step=100)
    MicroBatchSizer(BatchPlan(64, 8, 8), state, tmp_path, may_rise=True, largest=64)
    assert (state.micro_batch, state.memory_failures) == (16, 0)


def test_a_restart_is_free_only_if_the_next_attempt_begins_with_a_smaller_size(tmp_path: Path) -> None:
    state = TrainState(64, step=900, micro_batch=8, memory_step=100)
    sizing = MicroBatchSizer(BatchPlan(64, 8, 1), state, tmp_path, may_rise=True, largest=64)
    assert sizing.rise() and sizing.leave_for_next_attempt(64) == 8
    assert not sizing.is_new_to_next_attempt(8)  # it would rise to 16 again, and run out of memory again, forever
    sizing = MicroBatchSizer(BatchPlan(64, 8, 1), state, tmp_path, may_rise=True, largest=64)
    assert sizing.leave_for_next_attempt(64) == 4
    assert sizing.is_new_to_next_attempt(4)
    (tmp_path / "memory.json").unlink()
    assert not sizing.is_new_to_next_attempt(4)


def test_auto_does_not_choose_a_size_again_that_made_a_restart_necessary(tmp_path: Path) -> None:
    run = ["train", TINY, "--nproc", 1, "--micro_batch", "auto", "--output_dir", "run"]
    ended = unisono(*run, "--inject", "oom@rank0:step1:optimizer:x2", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert [line for line in ended.err.splitlines() if line.startswith("micro_batch auto: 1 samples")]


class Canary:
    """An object that lives as long as the graph that it is part of."""


class Watched(Tiny):
    """Reports whether the activations of the last forward pass are still alive."""

    canary: Any = None

    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        loss: Loss = super().loss(model, batch, noise)
        canary = Canary()
        loss.total.register_hook(lambda gradient, canary=canary: None)
        Watched.canary = weakref.ref(canary)
        return loss


@pytest.mark.parametrize("settings", [{}, {"micro_batch": "auto"}], ids=["step", "trial"])
def test_activations_are_gone_before_the_cache_is_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    alive, restore = [], Guard.restore

    def look(guard: Guard) -> None:
        alive.append(Watched.canary() is not None)
        restore(guard)

    monkeypatch.setattr(Guard, "restore", look)
    settings = settings | {"inject": "oom@rank0:step1:backward", "gpus": "0", "output_dir": str(tmp_path / "run")}
    train(Watched, **settings)
    assert alive and not any(alive)


def test_smaller_micro_batches_use_less_memory() -> None:
    assert smaller(32, share=5) == 3  # 32 was never tried, so half of the largest size that was
    assert smaller(4, share=100) == 2
    assert smaller(8, share=1) is None


def test_out_of_memory_errors_are_recognised() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


class Waiting(nn.Module):
    """A strategy that, for the guard, waits for other ranks."""

    collective = guardable = True

    def __init__(self) -> None:
        super().__init__()
        device = torch.device("cpu")
        self.model, self.settings = nn.BatchNorm1d(2), ParallelSettings()
        self.placement = Placement(device, 0, 2, [device], None)

    def clear_gradients(self) -> None:
        self.model.zero_grad()


def test_each_new_shape_is_guarded_for_some_steps() -> None:
    guard = Guard(Waiting(), guard_steps=2)  # type: ignore[arg-type]

    def step(*shape: int) -> bool:
        guard.begin()
        guard.note_shape({"x": torch.zeros(shape)})
        target = guard.is_needed
        guard.count_step(guarded=target)
        return target

    assert [step(4, 2) for _ in range(4)] == [True, True, False, False]
    assert [step(8, 2), step(4, 2), step(8, 2), step(8, 2)] == [True, False, True, False]


def test_the_guard_ends_if_shapes_never_repeat() -> None:
    guard = Guard(Waiting(), guard_steps=2)  # type: ignore[arg-type]
    target = []
    for number in range(1, 400):
        guard.begin()
        guard.note_shape({"x": torch.zeros(700 + number)})
        target.append(guard.is_needed)
        guard.count_step(guarded=target[-1])
    assert all(target[:60]) and not any(target[200:300])
    guard.begin()
    guard.note_shape({"x": torch.zeros(5000)})
    assert guard.is_needed  # much larger than all before
    assert len(guard._passed) < 80


RESTARTED = ["train", TINY, "--nproc", 2, "--max_steps", 8, "--save_every", 3]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of an undisturbed run."""
    folder: Path = tmp_path_factory.mktemp("calm")
    assert unisono(*RESTARTED, "--output_dir", "plain", cwd=folder).code == 0
    return losses(folder / "plain")


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        (["--inject", "oom@rank1:step6:backward", "--guard_steps", 2], "step 6"),
        pytest.param(["--inject", "oom@rank1:step6:reduce"], "step 6", marks=pytest.mark.slow),
        pytest.param(["--inject", "oom@rank1:step6:optimizer"], "in the optimizer", marks=pytest.mark.slow),
        (["--inject", "oom@rank0:step6:forward", "--strategy", "fsdp"], "step 6"),
    ],
    ids=["fast path", "reduce", "optimizer", "fsdp"],
)
def test_if_only_a_restart_helps_it_uses_a_smaller_size(
    tmp_path: Path, calm: list[float], flags: list[object], where: str
) -> None:
    ended = unisono(*RESTARTED, "--output_dir", "run", *flags, cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert where in ended.err and "restarting all ranks from the last checkpoint (not counted)" in ended.err
    assert losses(tmp_path / "run") == pytest.approx(calm, rel=1e-5)
    (event,) = [event for event in lines(tmp_path / "run", "events.jsonl") if event["kind"] == "oom"]
    assert not event["in_place"] and event["micro_batch"] == 2
    assert "2 per rank × 2 ranks × 2 accumulation" in ended.err.partition("restarting")[2]


def test_a_single_process_restarts_itself(tmp_path: Path) -> None:
    run = ["train", TINY, "--nproc", 1, "--max_steps", 8, "--save_every", 3, "--output_dir", "run"]
    ended = unisono(*run, "--inject", "oom@rank0:step5:optimizer", cwd=tmp_path)
    assert ended.code == 0 and "restarting from the last checkpoint (not counted)" in ended.err
    assert len(losses(tmp_path / "run")) == 8


@pytest.mark.parametrize("times", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_restarts_for_memory_do_not_count_against_max_restarts(tmp_path: Path, times: int) -> None:
    run = ["train", TINY, "--nproc", 2, "--strategy", "fsdp", "--max_steps", 4, "--save_every", 2, "--max_restarts", 1]
    run += ["--global_batch_size", 2048, "--batch_size", 1024, "--output_dir", "run"]
    # Rank 1 runs out of memory several times in step 3, with half the size each time; later rank 0 dies.
    faults = f"oom@rank1:step3:forward:x{times},kill@rank0:step4"
    ended = unisono(*run, "--inject", faults, cwd=tmp_path, seconds=240)
    assert ended.code == 0, ended.err
    events = lines(tmp_path / "run", "events.jsonl")
    sizes = [event["micro_batch"] for event in events if event["kind"] == "oom"]
    assert sizes == [1024 // 2**number for number in range(1, times + 1)]
    restarts = [event for event in events if event["kind"] == "restart"]
    assert [event.get("counted", True) for event in restarts] == [False] * times + [True]
    assert "restarting all ranks from the last checkpoint (1 of 1)" in ended.err
    assert len(losses(tmp_path / "run")) == 4


def test_max_restarts_0_also_forbids_restarts_for_memory(tmp_path: Path) -> None:
    run = ["train", TINY, "--nproc", 2, "--strategy", "fsdp", "--max_steps", 4, "--max_restarts", 0]
    ended = unisono(*run, "--output_dir", "run", "--inject", "oom@rank1:step2", cwd=tmp_path)
    assert ended.code == 3 and "restarting" not in ended.err


def test_faults_are_read_or_refused() -> None:
    (kill, slow) = parse("kill@rank1:step7, slow@step3:backward:0.2s:x2")
    assert (kill.rank, kill.step, kill.phase, kill.times) == (1, 7, "forward", 1)
    assert (slow.rank, slow.step, slow.phase, slow.seconds, slow.times) == (None, 3, "backward", 0.2, 2)
    for text in ("kill", "kill@step0", "kill@rank1", "boom@step1", "oom@step1:save-write", "kill@step1:step2"):
        with pytest.raises(Exception, match="inject"):
            parse(text)


def test_a_fault_happens_once_over_all_restarts(tmp_path: Path) -> None:
    def attempts() -> int:
        injector = Injector(parse("error@rank0:step2:x2"), 0, tmp_path / "memory")
        raised = 0
        for step in (1, 2, 2):
            try:
                injector.at("forward", step)
            except RuntimeError:
                raised += 1
        return raised

    assert [attempts(), attempts()] == [2, 0]
    Injector(parse("error@rank1:step2"), 0, tmp_path / "memory").at("forward", 2)  # another rank's


def test_a_fault_can_be_injected_into_the_preparation(tmp_path: Path) -> None:
    injector = Injector(parse("error@rank0:step1:prepare"), 0, tmp_path / "memory")
    with pytest.raises(RuntimeError, match="injected"):
        injector.at("prepare", 0)
    injector.at("prepare", 0)  # once


class Cramped(Sentences):
    """Rank 1 has memory for two sentences at once."""

    def loss(self, model: Any, batch: dict[str, torch.Tensor], noise: Any) -> Loss:
        import torch.distributed as dist

        if dist.get_rank() == 1 and len(batch["ids"]) > 2:
            raise torch.OutOfMemoryError("out of memory: three sentences")
        return super().loss(model, batch, noise)


def test_micro_batch_auto_finds_the_size_under_fsdp_without_a_restart(tmp_path: Path) -> None:
    settings = {"strategy": "fsdp", "dtype": "float64", "batch_size": 6, "max_steps": 3, "num_samples": 15}
    cramped = f"{Path(__file__)}:Cramped"
    runs = many_runs(
        [
            Run("roomy", "roomy", 2, settings),
            Run("cramped", "cramped", 2, settings | {"micro_batch": "auto"}, recipe=cramped),
            Run(
                "hsdp", "hsdp", 4, settings | {"micro_batch": "auto", "batch_size": 3, "shard_size": 2}, recipe=cramped
            ),
        ],
        tmp_path,
    )
    for name in ("cramped", "hsdp"):
        assert runs[name].state()["micro_batch"] == 2
        assert not runs[name].events("oom") and not runs[name].events("restart")
        assert float((runs[name].losses() - runs["roomy"].losses()).abs().max()) < 1e-10


@pytest.mark.parametrize(("room", "size", "tried"), [(8, 8, [8]), (3, 2, [8, 4, 2]), (0, 1, [8, 4, 2])])
def test_a_size_that_does_not_fit_is_halved_by_trial(room: int, size: int, tried: list[int], tmp_path: Path) -> None:
    sizes = []

    def try_out(plan: BatchPlan) -> None:
        sizes.append(plan.micro_batch)
        if plan.micro_batch > room:
            raise OutOfMemoryTogether("too much")

    sizer = MicroBatchSizer(BatchPlan(16, 8, 2), TrainState(16), tmp_path, may_rise=False, largest=8)
    assert sizer.fit(try_out) == (size < 8)
    assert (sizer.plan.micro_batch, sizes) == (size, tried)
