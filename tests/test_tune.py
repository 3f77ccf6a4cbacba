"""`unisono tune`: search spaces, pruning, kills and resumes, parallel trials, the page, and what users do wrong."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import unisono
from browser import Browser
from command_line import environment, lines, mark, marked, start, wait_until
from command_line import unisono as run
from unisono.cli.main import main
from unisono.config.fields import Field
from unisono.devices import Gpu
from unisono.engine.start.registry import load_recipe
from unisono.engine.start.run import configure
from unisono.errors import ConfigError, UserError
from unisono.tuning import slots
from unisono.tuning.space import Choices, Numbers, read_space
from unisono.tuning.study import Study, read_trials
from unisono.tuning.trial_run import TrialRun
from unisono.tuning.tune import StudyStopped, _Loop

MOONS = f"{Path(__file__).resolve().parent.parent / 'examples/own_model/recipe.py'}:TwoMoons"
SEARCH = ("--search", "learning_rate=log:1e-4..1e-1", "--search", "hidden=8|32")
SHORT = ("--gpus", "0", "--num_points", "512", "--eval_every", "10", "--max_steps", "40")


def field(name: str, annotation: Any) -> Field:
    return Field(name, annotation, None, "", "", "")


def study_of(folder: Path) -> Study:
    return read_trials(folder)


def summary(study: Study) -> list[tuple[Any, ...]]:
    """What must be the same in two studies: values, outcomes and evaluations of every trial."""
    return [(t.number, t.state, dict(t.params), t.value, tuple(t.evaluations)) for t in study.trials]


def test_a_range_has_the_type_of_its_setting() -> None:
    assert read_space(field("a", float), "log:1e-5..1e-2") == Numbers("a", 1e-5, 1e-2, whole=False, log=True)
    assert read_space(field("a", int), "16..256:16") == Numbers("a", 16, 256, whole=True, step=16)
    assert read_space(field("a", int | None), "-3..4") == Numbers("a", -3, 4, whole=True)
    assert read_space(field("a", float), "0..1").ends == ("0.0", "1.0")
    assert read_space(field("a", str), "x|y|x") == Choices("a", ("x", "y"))
    assert read_space(field("a", bool), [True, False]) == Choices("a", ("true", "false"))
    assert read_space(field("a", int), [1, 2]).text == "1|2"
    for text in ("log:1e-05..0.01", "0.1..0.5:0.1", "1.0..2.0"):
        assert read_space(field("a", float), text).text == text


@pytest.mark.parametrize(
    ("annotation", "text", "message"),
    [
        (float, "2..1", "the search space is empty"),
        (float, "1..1", "the search space is empty"),
        (float, "a|a", "the search space is empty"),
        (float, "log:0..1", "must begin above 0"),
        (float, "log:1..2:0.1", "has no steps"),
        (int, "1..9:10", "a step must be"),
        (int, "0.5..2", "expected a whole number"),
        (str, "1..2", "a range needs a number"),
        (float, "1e-3", "fix the value with --a 1e-3"),
        (int, "1|x", "expected a whole number, got 'x'"),
        (float, "1..inf", "finite"),
    ],
)
def test_a_bad_range_is_an_error_that_says_what_to_write(annotation: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="search a: ") as error:
        read_space(field("a", annotation), text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "the search space is empty; name a setting"),
        (("--search", "learning_rate"), "expected NAME=VALUES"),
        (("--search", "learning_rat=0..1"), "did you mean learning_rate?"),
        (("--search", "hiden=1..2"), "did you mean hidden?"),
        (("--search", "clip_length=1..2"), "there is no such setting"),
        (("--search", "hidden=1..8", "--hidden", "4"), "hidden is both set and searched"),
        (("--search", "hidden=1..8", "--search", "hidden=1..9"), "is given twice"),
        (("--search", "gpus=1|2"), "it cannot be searched"),
        (("--search", "ema_decay=0..2"), "search ema_decay, value 2.0: ema_decay"),
        (("--search", "hidden=1..8", "--trials", "0"), "trials: expected a whole number of at least 1"),
        (("--search", "hidden=1..8", "--parallel", "x"), "--parallel: invalid int value"),
        (("--search", "hidden=1..8", "--pruner", "best"), "--pruner: invalid choice"),
        (("--search", "hidden=1..8", "--objective", "loss"), "expected a metric of the evaluation"),
        (("--search", "hidden=1..8", "--eval_every", "-1"), "trials would never be evaluated"),
        (("--search", "hidden=1..8", "--pruner", "hyperband"), "set --eval_every"),
        (("--search", "hidden=1..8", "--nnodes", "2", "--node_rank", "0"), "a study runs on one machine"),
        (("--search", "hidden=1..8", "--prunner", "none"), "did you mean --pruner?"),
        (("--search", "hidden=1..8", "--config", "no.yaml"), "config file no.yaml cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    flags: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", MOONS, *flags, "--output_dir", "study"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_optuna_the_error_has_the_pip_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["tune", MOONS, *SEARCH, "--output_dir", str(tmp_path / "study")]) == 2
    assert 'pip install "unisono[tune]"' in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


def kill_all(study: Any, mark: dict[str, str]) -> None:
    """Kills the study's process and all its trials at once, as a power cut does."""
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    study.wait()


@pytest.mark.timeout(900)  # seven starts of Python and torch in turn, which take long on a busy machine
def test_a_study_that_was_killed_twice_equals_one_that_was_not(tmp_path: Path) -> None:
    flags = ("--gpus", "0", "--num_points", "512", "--eval_every", "50", "--num_epochs", "75", *SEARCH)
    command = ("-m", "unisono", "tune", MOONS, *flags, "--trials", "3", "--pruner_startup_trials", "1")
    reference = run(*command[2:], "--output_dir", "whole", cwd=tmp_path)
    assert reference.code == 0, reference.err
    folder = tmp_path / "killed"
    for trial in (0, 1):
        with_mark = mark()
        study = start([*command, "--output_dir", "killed"], cwd=tmp_path, **with_mark)
        saved = folder / "trials" / f"{trial:04d}" / "checkpoints"
        wait_until(lambda saved=saved: list(saved.glob("step_*/manifest.json")), "a checkpoint", 120)
        if trial:  # kills only the study's process: its trial must die with it
            study.kill()
            study.wait()
        else:
            kill_all(study, with_mark)
        wait_until(lambda with_mark=with_mark: not marked(with_mark), "no trial outlives its study")
        assert study.returncode == -signal.SIGKILL
    last = run(*command[2:], "--output_dir", "killed", cwd=tmp_path)
    assert last.code == 0, last.err
    assert "continuing the study" in last.err
    whole, killed = study_of(tmp_path / "whole"), study_of(folder)
    assert len(killed.trials) == killed.num_finished == 3
    assert summary(killed) == summary(whole)
    assert killed.best is not None and whole.best is not None and killed.best.value == whole.best.value
    starts = json.loads((folder / "trials/0001/run.json").read_text())["starts"]
    assert "resumed from" in starts[-1]["why"]  # the killed trial continued from its own checkpoint
    assert killed.trials[2].state == "pruned"


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study in which some trials are pruned, two at a time."""
    cwd = tmp_path_factory.mktemp("study")
    flags = ("--trials", "4", "--parallel", "2", "--pruner_startup_trials", "1", "--objective", "eval/correct")
    rates = ("--search", "learning_rate=0.01|1e-9", "--search", "hidden=8..32:8")
    done = run("tune", MOONS, *rates, *SHORT, *flags, "--direction", "maximize", "--output_dir", "s", cwd=cwd)
    assert done.code == 0, done.err
    assert "maximize eval/correct: 4 trials" in done.out and "--learning_rate=0.01" in done.out
    return cwd / "s"


def test_a_pruned_trial_says_so_in_its_run_folder_and_in_its_report(pruned: Path, browser: Browser) -> None:
    study = study_of(pruned)
    stopped = [trial for trial in study.trials if trial.state == "pruned"]
    if not stopped:
        pytest.fail(f"no trial was pruned: {summary(study)}")
    for trial in stopped:
        [event] = [line for line in lines(trial.folder, "events.jsonl") if line["kind"] == "pruned"]
        assert event["step"] == trial.step and event["value"] == trial.value and event["trial"] == trial.number
        assert json.loads((trial.folder / "run.json").read_text())["trial"]["outcome"] == "pruned"
    assert main(["report", str(stopped[0].folder)]) == 0
    browser("Page.navigate", url=(stopped[0].folder / "report.html").as_uri())
    browser.wait("document.readyState === 'complete'")
    assert browser.ask("document.querySelector('.status b').textContent") == "pruned"
    best = study.best
    assert best is not None and best.params["learning_rate"] == "0.01"
    assert json.loads((best.folder / "run.json").read_text())["trial"]["outcome"] == "complete"


def test_the_page_of_a_study_shows_all_trials_and_needs_no_network(pruned: Path, browser: Browser) -> None:
    assert main(["report", str(pruned)]) == 0
    browser.events.clear()
    browser("Page.navigate", url=(pruned / "study.html").as_uri())
    browser.wait("document.readyState === 'complete'")
    text = browser.ask("document.body.innerText")
    assert "4 of 4 trials" in text and "best so far" in text and "The best trial" in text
    assert browser.ask("document.querySelectorAll('tbody tr').length") >= 4
    assert browser.ask("document.querySelectorAll('.chart').length") >= 4  # history, curves, slices
    assert not [event for event in browser.events if event["method"] == "Log.entryAdded"]


def test_the_best_command_trains_the_best_trial_again(pruned: Path) -> None:
    study = study_of(pruned)
    assert study.best is not None
    words = (study.best_command() or "").split()
    again = run(*words[1:], cwd=pruned.parent)
    assert again.code == 0, again.err
    evaluations = [line for line in lines(pruned / "best") if "eval/correct" in line]
    assert evaluations[-1]["eval/correct"] == study.best.value


def test_another_search_in_the_folder_of_a_study_is_refused(pruned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (pruned / "study.json").read_bytes()
    flags = ("--objective", "eval/correct", "--direction", "maximize", "--pruner_startup_trials", "1")
    rates = ("--search", "learning_rate=0.01|1e-9", "--search", "hidden=8..64:8")
    assert main(["tune", MOONS, *rates, *SHORT, *flags, "--output_dir", str(pruned)]) == 2
    assert "search hidden is 8..32:8, not 8..64:8" in capsys.readouterr().err
    rates = ("--search", "learning_rate=0.01|1e-9", "--search", "hidden=8..32:8")
    assert main(["tune", MOONS, *rates, *SHORT, *flags, "--seed", "1", "--output_dir", str(pruned)]) == 2
    assert "seed is 0, not 1" in capsys.readouterr().err
    assert main(["tune", MOONS, *rates, *SHORT, *flags, "--output_dir", str(pruned / "trials/0000")]) == 2
    assert "is the folder of a run" in capsys.readouterr().err
    assert (pruned / "study.json").read_bytes() == before


@pytest.mark.slow
def test_sigterm_stops_a_study_with_checkpoints_and_python_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    flags = ("--gpus", "0", "--eval_every", "50", "--num_epochs", "31", "--pruner", "none")
    words = ["-m", "unisono", "tune", MOONS, "--search", "hidden=8|16", "--trials", "1", *flags, "--output_dir", "s"]
    study = start(words, cwd=tmp_path)
    metrics = tmp_path / "s/trials/0000/metrics.jsonl"
    wait_until(lambda: metrics.exists() and "eval/loss" in metrics.read_text(), "an evaluation", 120)
    study.terminate()
    _, error = study.communicate(timeout=120)
    assert study.returncode == 75, error
    assert "run the same command with --output_dir s" in error
    [stopped] = study_of(tmp_path / "s").trials
    assert stopped.state == "unfinished"
    monkeypatch.chdir(tmp_path)
    settings = {"gpus": "0", "eval_every": 50, "num_epochs": 31}
    done = unisono.tune(MOONS, search={"hidden": [8, 16]}, trials=1, pruner="none", output_dir="s", **settings)
    assert done.best is not None and done.best.state == "complete" and done.best.step == 31 * 64
    starts = json.loads((tmp_path / "s/trials/0000/run.json").read_text())["starts"]
    assert len(starts) == 2 and "resumed from" in starts[1]["why"]


@pytest.mark.parametrize("moment", ["before the trial starts", "while it starts"])
def test_a_signal_while_a_trial_is_prepared_leaves_it_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    owner, name = (_Loop, "_next_trial") if moment == "before the trial starts" else (TrialRun, "_start")
    original = getattr(owner, name)

    def interrupted(self: Any) -> Any:
        result = original(self)
        os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(owner, name, interrupted)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StudyStopped):
        unisono.tune(
            MOONS, search={"hidden": [8, 16]}, trials=1, output_dir="s", gpus="0", eval_every=10, max_steps=10**6
        )
    assert [trial.state for trial in study_of(tmp_path / "s").trials] == ["unfinished"]


def test_an_unknown_objective_ends_the_study_and_names_the_metrics(tmp_path: Path) -> None:
    done = run("tune", MOONS, *SEARCH, *SHORT, "--objective", "eval/acc", "--output_dir", "s", cwd=tmp_path)
    assert done.code == 2
    assert "objective eval/acc is not a metric of the evaluation, which has eval/correct, eval/loss" in done.err


@pytest.mark.slow
def test_a_study_whose_trials_all_fail_ends_with_the_reason(tmp_path: Path) -> None:
    rates = (
        "--search",
        "learning_rate=1e11|1e12",
        "--optimizer",
        "sgd",
        "--grad_clip",
        "0",
        "--max_skipped_steps",
        "1",
    )
    done = run("tune", MOONS, *rates, *SHORT, "--trials", "2", "--output_dir", "s", cwd=tmp_path)
    assert done.code == 3, done.err
    assert "all 2 trials have failed, the last one with:" in done.err and "0001.log" in done.err
    assert [trial.state for trial in study_of(tmp_path / "s").trials] == ["failed", "failed"]


def gpu(index: int) -> Gpu:
    return Gpu(index, f"GPU-{index}", "H200", total_bytes=80 << 30, free_bytes=80 << 30)


def test_parallel_trials_divide_the_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kind = load_recipe(MOONS)

    def divided(num_gpus: int, parallel: int, *flags: str) -> tuple[list[tuple[str, ...]], list[str]]:
        monkeypatch.setattr(slots, "visible_gpus", lambda: [gpu(index) for index in range(num_gpus)])
        monkeypatch.setattr(slots, "locked_gpus", lambda gpus: set())
        found, notes = slots.slots_of(configure(kind, flags=flags), parallel)
        return [slot.flags for slot in found], notes

    assert divided(4, 2, "--gpus", "all") == ([("--gpus=GPU-0,GPU-1,",), ("--gpus=GPU-2,GPU-3,",)], [])
    assert divided(4, 1, "--gpus", "all") == ([()], [])
    shared, notes = divided(2, 4, "--gpus", "all")
    assert shared == [("--gpus=GPU-0,",), ("--gpus=GPU-1,",)] * 2 and "4 trials share 2 GPUs" in notes[0]
    assert divided(3, 2, "--gpus", "0,2")[0] == [("--gpus=GPU-0,",), ("--gpus=GPU-2,",)]
    assert divided(4, 2, "--nproc", "1")[0] == [(), ()]
    with pytest.raises(UserError, match="GPU 7 does not exist"):
        divided(2, 2, "--gpus", "7,")
