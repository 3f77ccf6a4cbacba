"""`unisono tune --join`: several processes work on one study, also on SLURM as a job array."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from command_line import PATIENCE_S, TESTS, end, losses, mark, marked, start, unisono, wait_until
from test_tune import kill_all
from tiny_recipe import HOLD
from unisono.cli.main import main
from unisono.cli.slurm import main as slurm_command
from unisono.cluster.slurm.array import size_of
from unisono.errors import ConfigError, UserError
from unisono.tuning.study import Study, read_trials
from unisono.tuning.study_lock import CLAIMS, StudyLock

if TYPE_CHECKING:
    from slurm_cluster import Slurm

pytest_plugins = ["slurm_cluster"]

RECIPE = f"{TESTS / 'tiny_recipe.py'}:Evaluated"
SEARCH = ("--search", "learning_rate=log:1e-4..1e-1", "--pruner", "none")
STEPS = 8
FLAGS = ("--nproc", "1", "--eval_every", "2", "--max_steps", str(STEPS), *SEARCH)
HELD = "600 after 5"  # every trial waits for the test, after it has saved a checkpoint


def check_complete(folder: Path, trials: int) -> Study:
    """Every trial is complete, there are as many as planned, and each has trained every step once."""
    study = read_trials(folder)
    assert [(trial.number, trial.state) for trial in study.trials] == [(n, "complete") for n in range(trials)]
    assert [len(losses(trial.folder)) for trial in study.trials] == [STEPS] * trials
    assert len({trial.params["learning_rate"] for trial in study.trials}) == trials
    assert not (folder / CLAIMS).exists() and not (folder / "study.db").exists()
    assert (folder / "study.html").is_file()
    return study


def begun(folder: Path, number: int) -> bool:
    return bool(list((folder / f"trials/{number:04d}/checkpoints").glob("step_*/manifest.json")))


@pytest.mark.timeout(900)  # six starts of Python and torch, which take long on a busy machine
def test_the_trials_of_a_killed_process_are_continued_by_another_one(tmp_path: Path) -> None:
    folder, ours = tmp_path / "study", mark()
    command = ["-m", "unisono", "tune", RECIPE, *FLAGS, "--trials", 3, "--join", "--output_dir", "study"]
    hold = tmp_path / "hold"
    hold.write_text(HELD)
    killed = start(command, cwd=tmp_path, **ours, **{HOLD: str(hold)})
    wait_until(lambda: begun(folder, 0), "a checkpoint of the first trial", PATIENCE_S)
    other = start(command, cwd=tmp_path, **{HOLD: str(hold)})
    wait_until(lambda: (folder / "trials/0001.log").exists(), "the other process to take the next trial", PATIENCE_S)
    kill_all(killed, ours)
    hold.unlink()
    ended = end(other, 600)
    assert ended.code == 0, ended.err
    study = check_complete(folder, 3)
    starts = json.loads((study.trials[0].folder / "run.json").read_text())["starts"]
    assert len(starts) == 2 and starts[1]["from_step"] > 0, "the other process continued from the checkpoint"
    late = unisono(*command[2:], cwd=tmp_path)
    assert late.code == 0 and "3 trials" in late.out, "a process that comes late finds no trial left"


def test_two_processes_never_train_the_same_trial(tmp_path: Path) -> None:
    one, other = StudyLock(tmp_path, shared=True), StudyLock(tmp_path, shared=True)
    with one.whole_study():
        with other.whole_study():
            assert one.claim(0) and not other.claim(0) and other.claim(1) and not one.claim(1)
            assert not one.claim(0), "it trains this trial already"
            with one.decision():
                pass
        assert one.claim(1), "the other process has ended"
        one.release(0)
        assert not (tmp_path / CLAIMS / "0000").exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("before", "flags", "message"),
    [
        ("", (), "join: pass --output_dir with the folder of the study"),
        ("study.db", ("--output_dir", "study"), "contains a study that was started without --join"),
    ],
)
def test_a_mistake_is_one_line(
    before: str,
    flags: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if before:
        (tmp_path / "study").mkdir()
        (tmp_path / "study" / before).touch()
    assert main(["tune", RECIPE, *FLAGS, "--join", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# --- a job array


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_array_survives_kills_and_requeues(slurm: Slurm, tmp_path: Path) -> None:
    folder, ours = tmp_path / "study", mark()
    words = ["tune", RECIPE, *FLAGS, "--trials", 5, "--array", 3, "--job-name", "search", "--output_dir", "study"]
    hold = tmp_path / "hold"
    hold.write_text(HELD)
    more = {**slurm.environ, **ours, HOLD: str(hold)}
    ended = unisono("slurm", *words, "--submit", cwd=tmp_path, **more)
    assert ended.code == 0, ended.err
    match = re.search(r"Submitted as job (\d+)", ended.out)
    assert match is not None, ended.out
    job = int(match[1])
    wait_until(lambda: all(begun(folder, number) for number in range(3)), "three jobs at work", 600)
    [study] = [pid for pid in marked(ours, SLURM_ARRAY_TASK_ID="0") if is_tune(pid)]
    with suppress(ProcessLookupError):
        os.kill(study, signal.SIGKILL)  # as by lack of memory: the script starts it again
    answer = slurm.run("scontrol", "requeue", f"{job}_1")  # a preemption
    assert answer.code == 0, answer.err
    hold.unlink()

    def states() -> list[str]:
        """The states of the jobs, of which a requeued one need not wait for SLURM's delay of two minutes."""
        rows = slurm.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--array", "--format=%i %T").out
        for row in rows.splitlines():
            number, state = row.split()
            if state == "PENDING":
                slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now")
        return [row.split()[1] for row in rows.splitlines()]

    wait_until(lambda: set(states()) == {"COMPLETED"}, "the end of the jobs", 900)
    result = check_complete(folder, 5)
    assert any(len(json.loads((t.folder / "run.json").read_text())["starts"]) > 1 for t in result.trials)
    assert sorted(path.name for path in tmp_path.glob("*.log")) == [f"search-{job}_{task}.log" for task in range(3)]


def is_tune(pid: int) -> bool:
    """Whether it is the process of `unisono tune`, and neither srun nor a trial."""
    with suppress(OSError):
        is_python = "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
        return is_python and b"\0unisono\0tune\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.chdir(tmp_path)
    slurm_command(["tune", RECIPE, *SEARCH, *map(str, words)])


def test_the_script_asks_for_one_task_per_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--array", "8%4", "--gpus-per-node", "a100:2", "--parallel", 2, "--trials", 50, "--cpus-per-task", 16]
    script(tmp_path, monkeypatch, *words, "--time", "4:00:00", "--env", "A=b c", "--eval_every", 5)
    text = (tmp_path / "tune-evaluated.sbatch").read_text()
    for line in ("array=0-7%4", "nodes=1", "ntasks=1", "gpus-per-node=a100:2", "cpus-per-task=16", "signal=USR1@120"):
        assert f"\n#SBATCH --{line}\n" in text
    assert "#SBATCH --output=tune-evaluated-%A_%a.log" in text and "export A='b c'" in text
    [tune] = re.findall(r"^tune=\((.*)\)$", text, re.MULTILINE)
    assert tune.startswith(f"tune {RECIPE} --eval_every 5 --search=learning_rate=log:1e-4..1e-1 --trials=50 ")
    assert re.search(r" --parallel=2 --output_dir=runs/tune-evaluated-\d{8}-\d{6} --join$", tune)
    said = capsys.readouterr().out
    assert "8 jobs, 4 at a time, with 2 GPUs each; 50 trials in all" in said and "sbatch tune-evaluated.sbatch" in said
    with pytest.raises(UserError, match=r"already exists; pass --force"):
        script(tmp_path, monkeypatch, *words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "array: pass --array with the number of jobs"),
        (["--array", "0"], "array: expected a number of jobs such as 8"),
        (["--array", "1-4"], "array: expected a number of jobs"),
        (["--array", 2, "--gpus", 1], "gpus: a job uses the GPUs that SLURM gives to it"),
        (["--array", 2, "--gpus-per-node", 1, "--nproc", 2], "nproc: trials run on the GPUs"),
        (["--array", 2, "--nnodes", 2, "--node_rank", 0], "nnodes: a study runs on one machine"),
        (["--array", 2, "--search", "slop=1..2"], "did you mean slope?"),
        (["--array", 2, "--trials", 0], "trials: expected a whole number of at least 1"),
        (["--array", 2, "--partition", "a b"], "partition: expected"),
        (["--aray", 2], "unknown flag --aray; did you mean --array?"),
    ],
)
def test_a_mistake_in_an_array_is_found_before_anything_is_written(
    words: list[object], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        script(tmp_path, monkeypatch, *words, "--submit")
    assert not list(tmp_path.iterdir())


def test_the_size_of_an_array() -> None:
    assert (size_of("8"), size_of("8%4"), size_of("2%4")) == ((8, 8), (8, 4), (2, 2))
    with pytest.raises(ConfigError):
        size_of("8%0")


@pytest.mark.slow
def test_slurm_accepts_every_option_of_an_array(slurm: Slurm, tmp_path: Path) -> None:
    words = ["--array", "3%2", "--gpus-per-node", "a100:2", "--cpus-per-task", 2, "--mem", "100M", "--time", "1:00:00"]
    ended = unisono("slurm", "tune", RECIPE, *SEARCH, *words, cwd=tmp_path, **slurm.environ)
    assert ended.code == 0, ended.err
    answer = slurm.run("sbatch", "--test-only", tmp_path / "tune-evaluated.sbatch")
    assert answer.code == 0, answer
