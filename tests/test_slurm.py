"""SLURM, with a real cluster of two nodes; and the batch script that `unisono slurm` writes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from command_line import TINY, Ended, end, lines, losses, mark, marked, start, unisono, wait_until
from tiny_recipe import HOLD
from unisono.cli.slurm import main as slurm_command
from unisono.cluster.outcome import Outcome, write
from unisono.cluster.slurm.script import EXIT_AGAIN, EXIT_SMALLER, BatchJob, script, seconds_of
from unisono.engine.start.srun import judge
from unisono.errors import ConfigError, UserError
from unisono.observe.stop_time import seconds_to_stop

if TYPE_CHECKING:
    from slurm_cluster import Slurm

pytest_plugins = ["slurm_cluster"]

STEPS = 8
TRAIN = [TINY, "--max_steps", STEPS, "--global_batch_size", 4, "--dtype", "float64", "--save_every", 2]
TWO_NODES = ["--nodes", 2, "--ntasks-per-node", 1]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of an undisturbed run in one process."""
    place = tmp_path_factory.mktemp("one_rank")
    ended = unisono("train", *TRAIN, "--output_dir", "run", cwd=place)
    assert ended.code == 0, ended.err
    return losses(place / "run")


def submit(slurm: Slurm, place: Path, *words: object, **more: str) -> int:
    """Writes and submits the script for two nodes and returns the job's number."""
    ended = unisono("slurm", *TRAIN, *TWO_NODES, "--submit", *words, cwd=place, **slurm.environ, **more)
    assert ended.code == 0, ended.err
    match = re.search(r"Submitted as job (\d+)", ended.out)
    assert match is not None, ended.out
    return int(match[1])


def log(place: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(place.glob("*.log")))


def kinds(run: Path) -> list[str]:
    return [event["kind"] for event in lines(run, "events.jsonl")]


# --- with a real cluster


def test_srun_over_two_nodes_is_the_same_run(slurm: Slurm, tmp_path: Path, one_rank: list[float]) -> None:
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    words = ["-m", "unisono", "train", *TRAIN, "--output_dir", "run"]
    ended = end(start(words, cwd=tmp_path, program=[*srun, sys.executable], **slurm.environ))
    assert ended.code == 0, ended.err
    assert losses(tmp_path / "run") == pytest.approx(one_rank, rel=1e-10)
    [first] = json.loads((tmp_path / "run/run.json").read_text())["starts"]
    assert (first["launcher"], first["world"]) == ("slurm", 2)
    assert "rank 0 of 2 on 2 machines" in " ".join(ended.err.split())


def test_slurm_accepts_every_option(slurm: Slurm, tmp_path: Path) -> None:
    words = ["--nodes", 2, "--gpus-per-node", "a100:2", "--cpus-per-task", 2, "--mem", "100M", "--time", "1-12:00:00"]
    words += ["--partition", "all", "--account", "lab", "--qos", "normal", "--constraint", "a100&nvlink"]
    ended = unisono("slurm", *TRAIN, *words, "--output-script", "my job.sh", cwd=tmp_path, **slurm.environ)
    assert ended.code == 0, ended.err
    answer = slurm.run("sbatch", "--test-only", tmp_path / "my job.sh")
    assert answer.code == 0 and "using 8 processors on nodes n[0-1]" in answer.err, answer
    too_many = unisono("slurm", *TRAIN, "--gpus-per-node", 3, "--submit", cwd=tmp_path, **slurm.environ)
    assert too_many.code == 2 and too_many.err.startswith("unisono: sbatch failed: ") and too_many.err.count("\n") == 1


@pytest.mark.slow
def test_submit_and_follow_a_job_whose_rank_is_killed(slurm: Slurm, tmp_path: Path, one_rank: list[float]) -> None:
    place = tmp_path / "it's a folder; with $signs"
    place.mkdir()
    words = [*TWO_NODES, "--submit", "--follow", "--env", 'GREETING=it\'s "me" $HOME', "--job-name", "try-1"]
    words += ["--inject", "kill@rank1:step5", "--output_dir", "runs/my run"]
    ended = unisono("slurm", *TRAIN, *words, cwd=place, **slurm.environ)
    run = place / "runs/my run"
    assert ended.code == 0, ended.err + ended.out + log(place)
    assert losses(run) == pytest.approx(one_rank, rel=1e-10)
    assert "completed" in ended.out and f"step {STEPS} of {STEPS}" in ended.out and "restart: attempt 1" in ended.out
    [restart] = [event for event in lines(run, "events.jsonl") if event["kind"] == "restart"]
    # On a busy machine, SLURM may kill the other rank before it has written its outcome.
    assert restart["cause"].startswith(
        ("rank 1 died without an error message", "ranks 0, 1 died without an error message")
    )
    starts = json.loads((run / "run.json").read_text())["starts"]
    assert [(each["launcher"], each["world"]) for each in starts] == [("slurm", 2)] * 2
    assert starts[1]["from_step"] in (2, 4)  # the save of step 4 may have been in progress
    assert "restarting all ranks from the last checkpoint (1 of 3)" in log(place)
    assert "Traceback" not in log(place), "the survivor's complaint about its peer helps nobody"
    assert not (run / ".slurm").exists()


@pytest.mark.slow
def test_a_signal_saves_and_requeues_and_the_run_continues_by_itself(
    slurm: Slurm, tmp_path: Path, one_rank: list[float]
) -> None:
    hold, ours, run = tmp_path / "hold", mark(), tmp_path / "run"
    hold.write_text("2 after 4")
    job = submit(slurm, tmp_path, "--output_dir", "run", **{HOLD: str(hold)}, **ours)
    wait_until(lambda: len(lines(run)) >= 3, "three steps")
    answer = slurm.run("scancel", "--signal=USR1", job)  # what --signal=USR1@120 does near the time limit
    assert answer.code == 0, answer.err
    slurm.wait_for(job, "PENDING")
    assert not marked(ours), "nobody is left while the job waits"
    assert kinds(run)[-1] == "stopped" and len(lines(run)) < STEPS
    hold.unlink()
    slurm.start_now(job)
    slurm.wait_for(job, "COMPLETED")
    assert losses(run) == pytest.approx(one_rank, rel=1e-10)
    events = lines(run, "events.jsonl")
    assert [event["signal"] for event in events if event["kind"] == "signal"] == ["SIGUSR1"]
    first, second = json.loads((run / "run.json").read_text())["starts"]
    assert second["why"].startswith(f"resumed from step_{second['from_step']:08d}, restart 1") and first["world"] == 2


@pytest.mark.slow
def test_an_exception_in_a_rank_is_printed_once_and_user_errors_are_not_retried(slurm: Slurm, tmp_path: Path) -> None:
    failing = tmp_path / "failing"
    mistaken = tmp_path / "mistaken"
    for place in (failing, mistaken):
        place.mkdir()
    first = submit(slurm, failing, "--output_dir", "run", "--inject", "error@rank1:step3:x9", "--max_restarts", 1)
    slurm.wait_for(first, "FAILED")
    second = submit(slurm, mistaken, "--output_dir", "run", "--num_samples", 0)
    slurm.wait_for(second, "FAILED")
    text = log(failing)
    assert text.count("Traceback") == 2 and text.count("RuntimeError: injected: error@rank1:step3:x9") >= 2
    assert text.count("unisono: rank 1") == 2 and "all 1 restarts are used up (--max_restarts)" in text
    assert "ExitCode=3:0" in slurm.run("scontrol", "show", "job", first).out
    text = log(mistaken)
    assert text.count('unisono: dataset("train") is empty') == 1 and "Traceback" not in text
    assert "ExitCode=2:0" in slurm.run("scontrol", "show", "job", second).out
    assert not (mistaken / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_time_limit_requeues_and_the_loss_curve_does_not_show_it(
    slurm: Slurm, tmp_path: Path, one_rank: list[float]
) -> None:
    hold, run = tmp_path / "hold", tmp_path / "run"
    hold.write_text("15")  # 8 steps of 15 s: longer than until the signal
    # SLURM looks at the limits now and then: the signal comes up to a minute earlier, 30 to 90 s after the start
    words = ["--output_dir", "run", "--time", "2", "--signal-before", "30"]
    job = submit(slurm, tmp_path, *words, **{HOLD: str(hold)})
    slurm.wait_for(job, "RUNNING")
    slurm.wait_for(job, "PENDING", seconds=150)
    assert kinds(run)[-1] == "stopped" and 0 < len(lines(run)) < STEPS
    hold.unlink()
    slurm.wait_for(job, "COMPLETED", seconds=240)  # requeued automatically, two minutes later
    assert losses(run) == pytest.approx(one_rank, rel=1e-10)


@pytest.mark.slow
def test_preemption_saves_within_the_grace_time_and_the_job_continues(
    slurm: Slurm, tmp_path: Path, one_rank: list[float]
) -> None:
    hold, ours, run = tmp_path / "hold", mark(), tmp_path / "run"
    hold.write_text("2 after 4")
    job = submit(slurm, tmp_path, "--output_dir", "run", "--save_every", 0, **{HOLD: str(hold)}, **ours)
    wait_until(lambda: len(lines(run)) >= 3, "three steps")
    answer = slurm.run("scontrol", "requeue", job)  # SIGTERM to all, as preemption does
    assert answer.code == 0, answer.err
    slurm.wait_for(job, "PENDING")
    wait_until(lambda: not marked(ours), "nobody is left while the job waits")
    assert kinds(run)[-1] == "stopped"
    hold.unlink()
    slurm.start_now(job)
    slurm.wait_for(job, "COMPLETED")
    assert losses(run) == pytest.approx(one_rank, rel=1e-10)


@pytest.mark.slow
def test_scancel_ends_the_job_for_good_with_a_checkpoint(slurm: Slurm, tmp_path: Path) -> None:
    hold, ours, run = tmp_path / "hold", mark(), tmp_path / "run"
    hold.write_text("2 after 4")
    job = submit(slurm, tmp_path, "--output_dir", "run", "--save_every", 0, **{HOLD: str(hold)}, **ours)
    wait_until(lambda: len(lines(run)) >= 3, "three steps")
    assert slurm.run("scancel", job).code == 0
    slurm.wait_for(job, "CANCELLED")
    wait_until(lambda: not marked(ours), "nobody is left")
    assert kinds(run)[-1] == "stopped" and list((run / "checkpoints").glob("step_*"))


@pytest.mark.slow
def test_three_gpus_of_two_nodes_are_three_ranks_of_the_same_run(
    slurm: Slurm, tmp_path: Path, one_rank: list[float]
) -> None:
    words = ["--nodes", 2, "--total-gpus", 3, "--submit", "--output_dir", "run"]
    ended = unisono("slurm", *TRAIN, *words, cwd=tmp_path, **slurm.environ)
    assert ended.code == 0 and "2 nodes with 3 GPUs in total" in ended.out, ended
    match = re.search(r"Submitted as job (\d+)", ended.out)
    assert match is not None
    slurm.wait_for(int(match[1]), "COMPLETED", "FAILED")
    [first] = json.loads((tmp_path / "run/run.json").read_text())["starts"]
    assert first["world"] == 3, log(tmp_path)
    assert losses(tmp_path / "run") == pytest.approx(one_rank, rel=1e-10)


# --- the script, without a cluster


def job(**more: Any) -> BatchJob:
    inputs = {"job_name": "tiny", "folder": "/work", "output_dir": "run", "python": "python3", "train": ["a.py:A"]}
    return BatchJob(**{**inputs, "ntasks_per_node": 1, **more})


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("time", "1 day", "time: expected minutes"),
        ("time", "1:00\n#SBATCH --mail-user=x", "time: expected"),
        ("partition", "a b", "partition: expected"),
        ("partition", "a\n", "partition: expected"),
        ("account", "$(id)", "account: expected"),
        ("qos", "--wrap=x", "qos: expected"),
        ("constraint", "a`b`", "constraint: expected"),
        ("mem", "64 GB", "mem: expected"),
        ("job_name", "a/b", "job_name: expected"),
        ("job_name", "%x", "job_name: expected"),
        ("gpus_per_node", "many", "gpus_per_node: expected"),
        ("gpus_per_node", "4", "ntasks_per_node 1: a node has one task per GPU (4)"),
        ("ntasks_per_node", None, "gpus_per_node: set the number of GPUs"),
        ("nodes", 0, "nodes: expected at least 1"),
        ("cpus_per_task", 0, "cpus_per_task: expected at least 1"),
        ("modules", ["cuda; rm"], "module: expected"),
        ("environ", {"A-B": ""}, "env: expected NAME=VALUE"),
        ("environ", {"A": "b\nc"}, "unprintable characters"),
        ("folder", "/a\n#SBATCH --x", "unprintable characters"),
        ("train", ["a\x00b"], "unprintable characters"),
        ("signal_before", -1, "signal_before: expected at least 0"),
        ("total_gpus", 4, "total_gpus: it replaces gpus_per_node and ntasks_per_node"),
        ("container_mounts", ["/a:/b"], "container_mounts: there is no container"),
        ("container_image", "a;b", "container_image: expected an image"),
        ("container_image", "-x", "container_image: expected an image"),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        job(**{field: value})


@pytest.mark.parametrize("mount", ["/a", "/a:b", "/a b:/c", "/a:/b,/c:/d", "/a:/b:/c"])
def test_a_mount_of_a_container_is_a_pair_of_absolute_paths(mount: str) -> None:
    with pytest.raises(ConfigError, match="container_mounts: expected /PATH:/PATH"):
        job(container_image="me/it", container_mounts=[mount])


def test_ranks_run_in_a_container_that_sees_the_working_directory_and_the_run_folder() -> None:
    inside = script(job(container_image="me/it:1", container_mounts=["/sets:/data:ro"], output_dir="runs/a"))
    assert (
        "srun --kill-on-bad-exit=1 --container-image=me/it:1 --container-mounts=/work:/work,/sets:/data:ro "
        '--container-workdir=/work python3 -P -m unisono "${train[@]}"' in inside
    )
    assert '"$python" -P -m unisono.engine.start.srun' in inside, "the script itself runs outside of the container"
    elsewhere = script(job(container_image="/images/it.sqsh", output_dir="/scratch/a"))
    assert "--container-mounts=/work:/work,/scratch/a:/scratch/a " in elsewhere


def test_nodes_may_have_different_numbers_of_gpus() -> None:
    text = script(job(nodes=2, ntasks_per_node=None, total_gpus=3))
    for line in ("--nodes=2", "--ntasks=3", "--gpus-per-task=1"):
        assert f"\n#SBATCH {line}\n" in text
    assert "ntasks-per-node" not in text and "srun --kill-on-bad-exit=1 --gpu-bind=none " in text
    with pytest.raises(ConfigError, match=re.escape("total_gpus: expected at least one GPU per node (2), got 1")):
        job(nodes=2, ntasks_per_node=None, total_gpus=1)


def test_the_signal_must_come_before_the_time_limit() -> None:
    with pytest.raises(ConfigError, match="signal_before: expected 0 to less than the time limit"):
        job(time="2", signal_before=120)
    assert "--signal=USR1@119" in script(job(time="2", signal_before=119))
    assert "--signal" not in script(job(signal_before=0))


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("30", 1800), ("30:15", 1815), ("24:00:00", 86400), ("2-12", 216000), ("1-0:30", 88200), ("1-1:1:1", 90061)],
)
def test_time_limits_are_parsed_as_slurm_parses_them(time: str, seconds: int) -> None:
    assert seconds_of(time) == seconds


def test_every_argument_reaches_the_program_unchanged(tmp_path: Path) -> None:
    strange = ["a b", "$HOME", "`id`", "it's", '"', "*", "\\", "--x=ü"]
    text = script(job(train=strange, environ={"STRANGE": "'$(id)'"}, output_dir="my $run"))
    fake = tmp_path / "srun"
    fake.write_text('#!/bin/bash\nprintf "%s\\n" "$STRANGE" "${@:6}" > words\n')
    fake.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    subprocess.run(["bash"], input=text, text=True, cwd=tmp_path, env=environ, check=False, capture_output=True)
    assert (tmp_path / "words").read_text().splitlines() == ["'$(id)'", "train", *strange]


def test_the_script_requests_the_given_resources() -> None:
    text = script(
        job(
            nodes=2,
            ntasks_per_node=None,
            gpus_per_node="a100:8",
            cpus_per_task=4,
            constraint="a100&nvlink",
            modules=["cuda/12.4"],
            requeue=False,
        )
    )
    for line in ("--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=a100:8", "--no-requeue", "--open-mode=append"):
        assert f"\n#SBATCH {line}\n" in text
    assert "#SBATCH --constraint='a100&nvlink'" in text and "\nmodule load cuda/12.4\n" in text
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=4 " in text and "scontrol" not in text
    assert "\n#SBATCH --requeue\n" in script(job()) and "scontrol requeue" in script(job())


def command(*words: object, cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cwd)
    assert slurm_command([str(word) for word in words]) == 0


def test_a_script_is_not_overwritten_and_keeps_its_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [TINY, "--nodes", 2, "--gpus-per-node", 8, "--batch-size", 2]
    command(*words, cwd=tmp_path, monkeypatch=monkeypatch)
    output = capsys.readouterr().out
    text = (tmp_path / "Tiny.sbatch").read_text()
    assert (
        "Tiny.sbatch: 2 nodes with 8 GPUs each, 16 ranks, 32 samples per step" in output
        and "sbatch Tiny.sbatch" in output
    )
    [folder] = re.findall(r"^run=(.*)$", text, re.MULTILINE)
    assert re.fullmatch(r"runs/tiny-\d{8}-\d{6}", folder) and f"--output_dir={folder}" in text
    (tmp_path / "Tiny.sbatch").write_text("mine")
    with pytest.raises(UserError, match=r"Tiny.sbatch already exists; pass --force"):
        command(*words, cwd=tmp_path, monkeypatch=monkeypatch)
    assert (tmp_path / "Tiny.sbatch").read_text() == "mine"
    command(*words, "--force", cwd=tmp_path, monkeypatch=monkeypatch)
    assert "#SBATCH" in (tmp_path / "Tiny.sbatch").read_text()
    command(*words, "--print", "--output-script", "other", cwd=tmp_path, monkeypatch=monkeypatch)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--batch_sise", 2], "unknown flag --batch_sise; did you mean --batch_size"),
        (["--gpu-per-node", 2], "did you mean --gpus-per-node?"),
        (["--batch_size", 0], "batch_size: expected at least 1"),
        (["--nproc", 2], "nproc: under SLURM srun starts the ranks; use --ntasks-per-node instead"),
        (["--nodes", "two"], "--nodes: expected a whole number, got 'two'"),
        (["--nodes"], "--nodes: expected one argument"),
        (["--nodes", 1, "--nodes", 2], "--nodes: is set twice"),
        (["--resume", "never"], "resume: never would prevent the job from continuing"),
        (["--strategy", "dp"], "strategy dp is for one process, but this job has 4 ranks"),
        (["--env", "HOME"], "env: expected NAME=VALUE, got 'HOME'"),
        (["--global_batch_size", 6, "--batch_size", 4, "--gradient_accumulation_steps", 1], "is not global_batch_size"),
    ],
)
def test_a_user_error_is_found_before_anything_is_written(
    words: list[object], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        command(TINY, "--gpus-per-node", 4, *words, "--submit", cwd=tmp_path, monkeypatch=monkeypatch)
    assert not list(tmp_path.iterdir())


def test_the_signal_leaves_the_time_that_the_run_needs_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    saves = "".join(f'{{"kind": "save", "seconds": {seconds}}}\n' for seconds in (3.0, 40.0))
    (run / "events.jsonl").write_text('{"kind": "start"}\n' + saves + "damaged\n")
    (run / "metrics.jsonl").write_text('{"step": 1, "step_ms": 900}\n{"step": 2, "step_ms": 61000.5}\n')
    assert seconds_to_stop(run) == 180  # 30 + 61.0005 + 2 * 40, rounded up
    words = [TINY, "--gpus-per-node", 1, "--print"]
    for more, signal_before in (
        (["--output_dir", "run"], 180),
        (["--output_dir", "new", "--like", "run"], 180),
        (["--output_dir", "run", "--signal-before", 90], 90),
        (["--output_dir", "new"], 120),
    ):
        command(*words, *more, cwd=tmp_path, monkeypatch=monkeypatch)
        assert f"#SBATCH --signal=USR1@{signal_before}\n" in capsys.readouterr().out
    with pytest.raises(UserError, match="--like new: it is not a run folder, or the run has saved no checkpoint"):
        command(*words, "--like", "new", cwd=tmp_path, monkeypatch=monkeypatch)


def test_a_run_that_stops_quickly_still_has_a_minute(tmp_path: Path) -> None:
    assert seconds_to_stop(tmp_path) is None
    (tmp_path / "events.jsonl").write_text('{"kind": "save", "seconds": 0.2}\n')
    assert seconds_to_stop(tmp_path) == 60


def test_follow_needs_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--follow: there is no job yet; use --submit --follow"):
        command(TINY, "--gpus-per-node", 1, "--follow", cwd=tmp_path, monkeypatch=monkeypatch)


def test_submit_without_slurm_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="sbatch is not installed here"):
        command(TINY, "--gpus-per-node", 1, "--submit", cwd=tmp_path, monkeypatch=monkeypatch)


# --- how the script reacts to the ranks' outcomes


@pytest.mark.parametrize(
    ("outcomes", "code", "attempt", "decision"),
    [
        ([], 0, 0, 0),
        ([], 127, 0, 127),  # no python there
        ([], 143, 0, EXIT_AGAIN),  # one rank was killed, and srun killed the others
        ([], 143, 3, 3),
        ([("stopped", "")], 143, 0, 75),  # the other rank was already exiting
        ([("stopped", ""), ("stopped", "")], 75, 3, 75),
        ([("done", "")], 139, 0, 0),  # the other rank crashed while exiting
        ([("user_error", "no such file"), ("crashed", "connection closed by peer")], 143, 0, 2),
        ([("crashed", "connection closed by peer"), ("failed", "11 steps in a row")], 143, 0, 3),
        ([("crashed", "connection closed by peer")], 143, 1, EXIT_AGAIN),
        ([("crashed", "RuntimeError: boo"), ("crashed", "connection closed by peer")], 143, 2, EXIT_AGAIN),
        ([("crashed", "RuntimeError: boo")], 143, 3, 3),
        ([("out_of_memory", "out of memory"), ("crashed", "connection closed by peer")], 143, 3, EXIT_SMALLER),
    ],
)
def test_the_script_restarts_requeues_or_stops(
    outcomes: list[tuple[Any, str]], code: int, attempt: int, decision: int, tmp_path: Path
) -> None:
    run, folder = tmp_path / "run", tmp_path / "run/.slurm/1.0.0"
    folder.mkdir(parents=True)
    (run / "events.jsonl").write_text("")  # a step was trained after the folder was created
    os.utime(run / ".slurm", (0, 0))
    for rank, (kind, message) in enumerate(outcomes):
        write(folder, Outcome(kind, message, rank))
    assert judge(folder, run, code, attempt, 3) == decision


def test_failures_before_the_first_step_are_not_retried(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "run/.slurm/1.0.0"
    (run / ".slurm").mkdir(parents=True)
    (run / "events.jsonl").write_text("")  # events of an earlier start
    folder.mkdir()
    write(folder, Outcome("crashed", "RuntimeError: boo", 0))
    assert judge(folder, run, 143, 0, 3) == 3


def test_a_signal_before_the_first_step_is_a_stop_too(tmp_path: Path) -> None:
    hold = tmp_path / "slow_to_import.py"
    hold.write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    more = {"UNISONO_OUTCOMES": str(tmp_path), "SLURM_PROCID": "3"}
    process = start(["-m", "unisono", "train", f"{hold}:Recipe"], cwd=tmp_path, **more)
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGUSR1)
    ended: Ended = end(process)
    assert ended.code == 75
    outcome = json.loads((tmp_path / "outcome_rank3.json").read_text())
    assert (outcome["kind"], outcome["rank"]) == ("stopped", 3)
    assert shlex.split(outcome["message"])[0] == "SIGUSR1"
