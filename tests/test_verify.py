"""`unisono verify` reports runs that are the same as the same, and finds those that differ."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import TESTS, unisono
from unisono.cli.main import main
from unisono.cli.verify import print_verdict
from unisono.cluster.launch.job_folder import remove_abandoned
from unisono.cluster.launch.warm_ranks import WarmRanks
from unisono.cluster.outcome import Outcome
from unisono.devices import GpuLock
from unisono.engine.start.device_plan import DevicePlan
from unisono.engine.start.registry import load_recipe
from unisono.engine.start.run import configure
from unisono.engine.start.warm_rank import COMMAND
from unisono.engine.verification.verify import (
    Variant,
    VariantFailed,
    Verdict,
    VerifyPlan,
    _Runner,
    uneven_batch,
    variants,
    verify,
)
from unisono.errors import ConfigError, UserError

RECIPES = TESTS / "verified_recipes.py"

Verify = Callable[..., Verdict]


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmRanks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")
        with WarmRanks(COMMAND, 2) as ranks:
            yield ranks


@pytest.fixture
def run_verify(warm: WarmRanks, monkeypatch: pytest.MonkeyPatch) -> Verify:
    """Runs `unisono verify` with warm processes that all these tests share."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(
        recipe: str,
        *flags: str,
        ranks: tuple[int, ...] = (1, 2),
        strategies: tuple[str, ...] = ("ddp",),
        precision: str = "float64",
        steps: int = 3,
        told: list[str] | None = None,
    ) -> Verdict:
        words = f"{RECIPES}:{recipe}"
        resolved = configure(load_recipe(words), flags=["--gpus", "0", *flags])
        plan = VerifyPlan(ranks, steps, strategies, precision)
        return verify(words, resolved, plan, (told if told is not None else []).append, warm)

    return run


def conclusion(verdict: Verdict, capsys: Any, precision: str = "float64") -> tuple[int, str]:
    """The exit code, and all that the command prints, in one line."""
    code = print_verdict(verdict, VerifyPlan((1, 2), 3, ("ddp",), precision))
    return code, " ".join(capsys.readouterr().out.split())


def test_quantised_products_are_compared_in_float64(run_verify: Verify) -> None:
    messages: list[str] = []
    size, batch = ("--quantize_min_size", "16"), ("--batch_size", "6")
    for flags in (("--mixed_precision", "fp8"), ("--quantize", "int8", "--quantize_weight_gradient", "true")):
        verdict = run_verify("LanguageModel", *flags, *size, *batch, strategies=("ddp", "fsdp"), told=messages)
        assert all(result.same for result in verdict.results)
    micro_batches = [result.variant.micro_batch for result in verdict.results]
    assert micro_batches == [1] * 4, "micro-batches of one sample, because the result depends on them"
    assert sum("depends on the micro-batches by design" in line for line in messages) == 1


def test_an_invariant_recipe_is_the_same_run_on_one_and_two_ranks(tmp_path: Path) -> None:
    done = unisono(
        "verify", f"{RECIPES}:Honest", "--ranks", "1,2", "--strategies", "ddp,fsdp", cwd=tmp_path, seconds=240
    )
    assert done.code == 0, done.err
    assert done.out.count(" same ") == 5 and "repeatable" in done.out
    assert "Same run" in done.out and "DIFFERS" not in done.out
    assert len(done.err.splitlines()) == 7 and "again (2 of 7)" in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", ["Mean", "Normed"])
def test_the_first_differing_weight_of_a_recipe_that_depends_on_the_micro_batch_is_named(
    run_verify: Verify, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with one rank, where only micro-batches can differ."""
    verdict = run_verify(recipe, "--batch_size", "10", ranks=(1,))
    assert [(a.role, a.same) for a in verdict.results] == [("reference", True), ("repeat", True), ("variant", False)]
    code, text = conclusion(verdict, capsys)
    named = re.search(r"first weight that differs is (\S+)\. ", text)
    assert code == 1 and named is not None and re.fullmatch(r"[012]\.(weight|bias|running_\w+)", named[1])


def test_verify_with_one_rank_compares_another_split_into_micro_batches(run_verify: Verify) -> None:
    for batch in range(1, 60):
        plan = VerifyPlan((1,), 5, ("ddp",), "float64")
        first, second = variants(plan, uneven_batch(batch, (1,)))
        assert first.micro_batches == 1 < second.micro_batches
        assert uneven_batch(batch, (1,)) % second.micro_batches, "equal parts would hide a loss that is a mean"
        assert batch == 1 or len(variants(plan, batch)) == 2  # a global batch that the user set stays
    with pytest.raises(ConfigError, match="nothing to compare; use --ranks 1,2 or a larger batch"):
        run_verify("Honest", "--global_batch_size", "1", ranks=(1,))
    assert len(run_verify("Honest", "--global_batch_size", "2", ranks=(1, 1)).results) == 3


@pytest.mark.parametrize("recipe", ["Unrepeatable", "OrderOfASet"])
def test_a_nondeterministic_recipe_is_distinguished_from_one_that_depends_on_ranks(
    run_verify: Verify, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = run_verify(recipe)
    assert [result.role for result in verdict.results] == ["reference", "repeat"] and not verdict.repeatable
    code, text = conclusion(verdict, capsys)
    assert code == 1 and "Not repeatable: two runs of 1 rank" in text and "os.urandom" in text
    assert "micro-batch" not in text.partition("Not repeatable")[2]


@pytest.mark.parametrize(("recipe", "buffer"), [("Normed", "running_mean"), ("Spectral", "0._u")])
def test_state_that_the_forward_pass_changes_is_named_among_the_causes(
    run_verify: Verify, recipe: str, buffer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = conclusion(run_verify(recipe, "--batch_size", "10", ranks=(1,)), capsys)
    assert code == 1 and f"{buffer}" in text.partition("state that the forward pass changes")[2]
    code, text = conclusion(run_verify("Mean", "--batch_size", "10", ranks=(1,)), capsys)
    assert code == 1 and "forward pass" not in text


def test_metrics_are_compared_and_nondeterministic_ones_are_named(
    run_verify: Verify, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = run_verify("CountsCalls", ranks=(1,))
    assert verdict.results[-1].differences is not None and verdict.results[-1].differences.trained_the_same
    code, text = conclusion(verdict, capsys)
    assert code == 1 and "the metric calls differs" in text and "mean of means" in text
    code, text = conclusion(run_verify("TellsTheTime", ranks=(1,)), capsys)
    assert code == 0 and "are not compared: clock, eval/clock." in text and "Same run" in text


def test_the_advice_never_offers_the_precision_in_use(run_verify: Verify, capsys: pytest.CaptureFixture[str]) -> None:
    for precision, other in (("float64", "float32"), ("float32", "float64")):
        verdict = run_verify("Mean", "--batch_size", "10", ranks=(1,), precision=precision)
        _, text = conclusion(verdict, capsys, precision)
        assert f"--precision {other}" in text and f"--precision {precision}" not in text


def test_weights_without_a_gradient_may_drift_in_float32_and_others_may_not(run_verify: Verify) -> None:
    """Key biases: Adam turns rounding errors into full steps, which do not affect the loss."""
    verdict = run_verify("LanguageModel", ranks=(1,), precision="float32", steps=5)
    result = verdict.results[-1]
    assert result.differences is not None
    assert result.differences.weight > 1e-3, "no weight has drifted: this test shows nothing"
    assert result.differences.loss < 1e-5 and result.same
    assert not run_verify("MeanLanguageModel", ranks=(1,), precision="float32", steps=5).results[-1].same


def test_a_run_that_crashes_is_shown_with_its_reason(run_verify: Verify) -> None:
    with pytest.raises(VariantFailed, match=r"^1 rank, single, 1 x 7: rank 0.*the loss is broken") as caught:
        run_verify("Crashes")
    lines = caught.value.trace.splitlines()
    assert 'raise ValueError("the loss is broken")' in caught.value.trace and len(lines) < 15
    kept = Path(lines[-1].removeprefix("full traceback: "))
    assert "in run_session" in kept.read_text()
    kept.unlink()


@pytest.mark.slow
def test_a_variant_that_fails_does_not_end_the_others(run_verify: Verify, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether it raises, hangs or ends its process."""
    for recipe, flags, failed, reason in (
        ("CrashesOnTwoRanks", (), [False, False, False, True, True], "rank 1, step 1: ValueError: the loss is broken"),
        ("ExitsSilently", (), [False, False, False, True, True], "rank 1, step 1: exited with status 0"),
        (
            "HangsUnderDdp",
            ("--start_timeout", "6"),
            [False, False, False, True, False],
            "rank 1, step 1: no progress for ",
        ),
    ):
        verdict = run_verify(recipe, *flags)
        assert [result.failure is not None for result in verdict.results] == failed, (recipe, verdict)
        failures = " ".join(str(result.failure) for result in verdict.results if result.failure)
        assert reason in failures, failures
        assert all(result.same for result in verdict.results if result.failure is None)
        assert print_verdict(verdict, VerifyPlan((1, 2), 3, ("ddp",), "float64")) == 3
        assert "FAILED" in capsys.readouterr().out


def test_runs_of_verify_do_not_affect_each_other(run_verify: Verify) -> None:
    verdict = run_verify("LeavesTraces", strategies=("ddp", "fsdp"))
    assert len(verdict.results) == 7 and all(result.same for result in verdict.results), verdict


def test_an_invalid_call_is_rejected_before_anything_else_is_printed(run_verify: Verify, tmp_path: Path) -> None:
    messages: list[str] = []
    with pytest.raises(UserError, match='dataset\\("train"\\) is empty'):
        run_verify("Empty", told=messages)
    with pytest.raises(UserError, match=r"got 'adamm'"):
        run_verify("Honest", "--optimizer", "adamm", told=messages)
    assert not messages
    run_verify("Honest", ranks=(1,), told=messages)
    assert len(messages) == 3


def test_ending_verify_ends_its_processes(tmp_path: Path) -> None:
    with WarmRanks(COMMAND, 2) as ranks:
        pids = [process.pid for process in ranks._processes]
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Killing:
    """Warm ranks whose first run ends in `kill -9` of this process."""

    def run(self, *arguments: Any, **more: Any) -> list[Outcome]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []


def test_the_next_start_removes_the_folder_of_a_killed_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    recipe, warm = f"{RECIPES}:Honest", Killing()
    resolved = configure(load_recipe(recipe), flags=["--gpus", "0"])
    plan = VerifyPlan((1, 2), 3, ("ddp",), "float64")
    child = os.fork()
    if child == 0:
        try:
            verify(recipe, resolved, plan, lambda text: None, warm)  # type: ignore[arg-type]
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert list(tmp_path.glob("unisono-*/1/job.json")), "nobody was there to remove it"
    remove_abandoned()
    assert not list(tmp_path.iterdir())


def test_micro_batches_and_shares_are_uneven_so_that_a_mean_cannot_hide() -> None:
    for batch in range(2, 60):
        uneven = uneven_batch(batch, (1, 2, 3))
        assert uneven % 3 and batch <= uneven <= batch + 1
        for variant in variants(VerifyPlan((1, 2, 3), 5, ("ddp",), "float64"), uneven):
            splits = variant.micro_batches == 1 or uneven % (variant.ranks * variant.micro_batches)
            assert splits or -(-uneven // variant.ranks) < 5
        assert batch < 5 or len(variants(VerifyPlan((1, 2), 5, ("ddp",), "float64"), uneven_batch(batch, (1, 2)))) == 4


def test_invalid_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--ranks", "0"],
        ["--ranks", "two"],
        ["--ranks", "1,100000"],
        ["--strategies", "zero"],
        ["--precision", "float8"],
        ["--steps"],
    ):
        assert main(["verify", f"{RECIPES}:Honest", *words]) == 2
        error = capsys.readouterr().err
        assert words[0] in error and len(error.splitlines()) == 1, words


class Crashing:
    """Warm ranks whose every run fails."""

    def run(self, *arguments: Any, **more: Any) -> list[Outcome]:
        return [Outcome("crashed", "the loss is broken", 0)]


def test_a_run_that_failed_releases_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_devices(resolved: Any) -> DevicePlan:
        lock = GpuLock(tmp_path)
        assert lock.acquire("GPU-1"), "the run before still holds it"
        return DevicePlan(1, {}, None, [], lock)

    monkeypatch.setattr("unisono.engine.verification.verify.plan_devices", plan_devices)
    words = f"{RECIPES}:Honest"
    plan, resolved = VerifyPlan((1,), 2, ("ddp",), "float64"), configure(load_recipe(words), flags=["--gpus", "0"])
    warm: Any = Crashing()
    runner, failures = _Runner(words, resolved, plan, 4, tmp_path, warm, str, 2), []
    for _ in range(2):
        with pytest.raises(VariantFailed) as caught:
            runner.run(Variant(1, "single", 4, 1))
        failures.append(caught.value)  # as the verdict stores it, with its traceback


@pytest.mark.parametrize("flag", [["--strategy", "fsdp"], ["--strategy=fsdp"]])
def test_a_single_strategy_is_not_silently_ignored(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{RECIPES}:Honest", *flag]) == 2
    assert "pass --strategies" in capsys.readouterr().err
