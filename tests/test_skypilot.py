"""The task of `unisono skypilot`: valid by SkyPilot's schema, and its `run` is executed and disturbed as processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from command_line import PATIENCE_S, TESTS, TINY, Ended, end, environment, lines, losses, start, unisono, wait_until
from tiny_recipe import HOLD
from unisono.cli.skypilot import main as skypilot_command
from unisono.cluster.skypilot import SkyPilotTask, Storage, task_file
from unisono.errors import ConfigError, UserError

SCHEMA = TESTS / "schemas/skypilot.json"
STEPS = 8
TRAIN = [TINY, "--max_steps", STEPS, "--global_batch_size", 4, "--dtype", "float64", "--save_every", 2]
NEEDED = ["--workdir", TESTS, "--setup", "pip install unisono", "--volume", "shared"]
ALL_OPTIONS: list[object] = [
    "--infra",
    "aws/us-east-1",
    "--cpus",
    "16+",
    "--memory",
    "256",
    "--disk-size",
    500,
    "--spot",
]
ALL_OPTIONS += ["--image", "me/it:1", "--setup", "echo 'a: b' && true", "--bucket", "s3://sets/a:/sets"]
ALL_OPTIONS += ["--env", "NCCL_DEBUG=INFO", "--secret", "WANDB_API_KEY", "--restarts-on-errors", 2, "--name", "my-run"]


def command(*words: object, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Runs `unisono skypilot` in this process and returns the task."""
    assert skypilot_command([str(word) for word in words]) == 0
    return dict(yaml.safe_load(capsys.readouterr().out))


def problems(task: dict[str, Any]) -> list[str]:
    """What SkyPilot's schema says about a task."""
    validator = Draft202012Validator(json.loads(SCHEMA.read_text()))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(task)]


# --- a valid task


@pytest.mark.parametrize("more", [[], ["--nodes", 4, *ALL_OPTIONS]], ids=["plain", "all options"])
def test_the_task_is_valid_by_the_schema_of_skypilot(more: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    task = command(TINY, *NEEDED, "--gpus-per-node", "H100:8", *more, capsys=capsys)
    assert problems(task) == []


def test_the_schema_rejects_what_skypilot_rejects(capsys: pytest.CaptureFixture[str]) -> None:
    task = command(TINY, *NEEDED, "--gpus-per-node", "H100:8", *ALL_OPTIONS, capsys=capsys)
    text = yaml.safe_dump(task)
    for right, wrong in (
        ("num_nodes", "nodes"),
        ("use_spot: true", "use_spot: sometimes"),
        ("recover_on_exit_codes", "recover_on_exit_code"),
        ("- 75", "- 256"),
        ("MOUNT_CACHED", "MOUNTED"),
        ("infra: aws", "infra: nowhere"),
    ):
        assert right in text
        assert problems(yaml.safe_load(text.replace(right, wrong))), wrong


def test_all_options_reach_the_task(capsys: pytest.CaptureFixture[str]) -> None:
    task = command(TINY, *NEEDED, "--nodes", 4, "--gpus-per-node", "H100:8", *ALL_OPTIONS, capsys=capsys)
    assert task["resources"] == {
        "infra": "aws/us-east-1",
        "accelerators": "H100:8",
        "cpus": "16+",
        "memory": "256",
        "disk_size": 500,
        "image_id": "docker:me/it:1",
        "use_spot": True,
        "job_recovery": {"max_restarts_on_errors": 2, "recover_on_exit_codes": [75]},
    }
    assert (task["name"], task["num_nodes"], task["workdir"]) == ("my-run", 4, str(TESTS))
    assert task["volumes"] == {"/data": "shared"}
    assert task["file_mounts"] == {"/sets": {"source": "s3://sets/a", "mode": "MOUNT_CACHED"}}
    assert task["envs"] == {"NCCL_DEBUG": "INFO"} and task["secrets"] == {"WANDB_API_KEY": None}
    assert task["setup"] == "set -e\npip install unisono\necho 'a: b' && true\n"
    assert "tiny_recipe.py:Tiny" in task["run"] and str(TESTS) not in task["run"], "paths begin at the uploaded folder"
    assert re.search(r"--output_dir=/data/runs/my-run-\d{8}-\d{6} ", task["run"])


# --- the machines, as processes


class Machines:
    """The machines of a task: each executes its `run` as SkyPilot does, in bash with SkyPilot's variables."""

    def __init__(self, task: dict[str, Any], folder: Path) -> None:
        self.task, self.folder = task, folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.running: list[subprocess.Popen[str]] = []
        self.others: dict[str, str] = {}

    def start(self, rank: int) -> subprocess.Popen[str]:
        """Starts the machine with this number: what its `run` executes, in a process of its own."""
        words = self.executed(rank)
        assert words[:2] == ["-P", "-m"]
        process = start(words[1:], cwd=Path(self.task["workdir"]), **self.variables(rank))
        self.running.append(process)
        return process

    def start_shell(self, rank: int) -> subprocess.Popen[str]:
        """Starts the machine with this number: its `run` in a real shell."""
        process = self._bash(rank, f'exec {shlex.quote(sys.executable)} "$@"')
        self.running.append(process)
        return process

    def executed(self, rank: int, code: int = 0) -> list[str]:
        """The arguments with which `run` executes python3, which then ends with this exit code."""
        words = self.folder / f"words-{rank}"
        process = self._bash(rank, f'printf "%s\\0" "$@" > {shlex.quote(str(words))}; exit {code}')
        assert end(process).code == code
        return words.read_text().split("\0")[:-1]

    def variables(self, rank: int) -> dict[str, str]:
        """The environment variables of a machine."""
        return {
            "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * self.task["num_nodes"]),
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_NODES": str(self.task["num_nodes"]),
            "SKYPILOT_NUM_GPUS_PER_NODE": "0",
            **self.task.get("envs", {}),
            **self.others,
        }

    def _bash(self, rank: int, python3: str) -> subprocess.Popen[str]:
        programs = self.folder / f"bin-{rank}"
        programs.mkdir(exist_ok=True)
        (programs / "python3").write_text(f"#!/bin/bash\n{python3}\n")
        (programs / "python3").chmod(0o755)
        env = environment(**self.variables(rank))
        env["PATH"] = f"{programs}:{env['PATH']}"
        # SkyPilot appends lines that wait for the upload of buckets, and end with the exit code of the command.
        script = self.task["run"].replace(":29400", f":{self.port}") + "\n__code=$?\nexit $__code\n"
        return subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.task["workdir"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def recovers(self, codes: list[int]) -> bool:
        """Whether a managed job starts the machines again: StrategyExecutor.should_restart_on_failure of SkyPilot."""
        recovery = self.task["resources"]["job_recovery"]
        return (
            any(code in recovery["recover_on_exit_codes"] for code in codes) or recovery["max_restarts_on_errors"] > 0
        )


@pytest.fixture
def machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Machines]:
    """Two machines with one CPU rank each, whose shared folder is a folder."""
    words = [*TRAIN, "--workdir", TESTS, "--setup", "true", "--shared-folder", tmp_path, "--nodes", 2, "--nproc", 1]
    words += ["--output_dir", tmp_path / "my run", "--env", f"{HOLD}={tmp_path / 'hold'}"]
    (tmp_path / "hold").write_text("2 after 4")
    machines = Machines(command(*words, capsys=capsys), tmp_path)
    yield machines
    for process in machines.running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            end(process)


@pytest.mark.parametrize("in_shell", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "in a shell"])
@pytest.mark.timeout(900)
def test_two_machines_train_and_new_ones_continue_the_same_run(
    in_shell: bool, machines: Machines, tmp_path: Path
) -> None:
    ended: Ended = unisono("train", *TRAIN, "--output_dir", "one", cwd=tmp_path)
    assert ended.code == 0, ended.err
    run = tmp_path / "my run"
    begin = machines.start_shell if in_shell else machines.start
    processes = [begin(0), begin(1)]
    wait_until(lambda: len(lines(run)) >= 3, "three steps", PATIENCE_S)
    os.killpg(processes[1].pid, signal.SIGTERM)  # the cloud takes machine 1 away
    stopped = [end(process) for process in processes]
    assert stopped[0].code == 75, stopped
    assert machines.recovers([each.code for each in stopped])
    assert 0 < len(lines(run)) < STEPS
    (tmp_path / "hold").unlink()
    done = [end(process) for process in [begin(0), begin(1)]]
    assert [each.code for each in done] == [0, 0], done
    assert losses(run) == pytest.approx(losses(tmp_path / "one"), rel=1e-10)
    starts = json.loads((run / "run.json").read_text())["starts"]
    assert [each["world"] for each in starts] == [2, 2]


def test_a_user_error_is_not_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TRAIN, "--workdir", TESTS, "--setup", "true", "--shared-folder", tmp_path, "--num_samples", 0]
    machines = Machines(command(*words, capsys=capsys), tmp_path)
    assert machines.task["num_nodes"] == 1 and "nnodes" not in machines.task["run"]
    ended = end(machines.start(0))
    assert ended.code == 2 and not machines.recovers([ended.code, 137]), ended
    machines.executed(0, code=75)  # the exit code of `run` is that of unisono


# --- the command


def task(**more: Any) -> SkyPilotTask:
    inputs: dict[str, Any] = {"name": "tiny", "train": ["a.py:A"], "output_dir": "/data/a", "setup": ["true"]}
    return SkyPilotTask(**{**inputs, "volumes": [Storage("shared", "/data")], **more})


def test_every_argument_reaches_the_program_unchanged(tmp_path: Path) -> None:
    strange = ["a b", "$HOME", "$(id)", "`id`", "it's", '"', "*", "\\", "--x=ü: #", "- y", "null", "{{a}}", "%s"]
    document = yaml.safe_load(task_file(task(train=strange, nodes=2, environ={"A": "$(id) 'x': #"})))
    assert document["envs"] == {"A": "$(id) 'x': #"}
    document["workdir"] = str(tmp_path)
    machines = Machines(document, tmp_path)
    machines.others = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    words = machines.executed(1)
    assert words[:4] == ["-P", "-m", "unisono", "train"] and words[4 : 4 + len(strange)] == strange
    own = ["--gpus=8", "--nnodes=2", "--node_rank=1", f"--rdzv_endpoint=10.0.0.1:{machines.port}"]
    assert words[4 + len(strange) :] == own


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("name", "my run", "name: expected letters"),
        ("name", "a\n", "name: expected"),
        ("gpus_per_node", "8", "gpus_per_node: expected type:number such as H100:8"),
        ("infra", "aws; id", "infra: expected cloud"),
        ("cpus", "many", "cpus: expected a number of cores"),
        ("memory", "64GB", "memory: expected a number of GiB"),
        ("image", "me/it 1", "image: expected a container image"),
        ("nodes", 0, "nodes: expected at least 1"),
        ("restarts_on_errors", -1, "restarts_on_errors: expected at least 0"),
        ("environ", {"A-B": ""}, "env: expected NAME=VALUE"),
        ("environ", {"SKYPILOT_NODE_RANK": "0"}, "env: SkyPilot sets SKYPILOT_NODE_RANK"),
        ("environ", {"A": "b\nc"}, "unprintable characters"),
        ("secrets", ["a b"], "secret: expected"),
        ("setup", [], "setup: pass --setup with the command that installs unisono"),
        ("setup", ["a\nb"], "unprintable characters"),
        ("train", ["a\x00b"], "unprintable characters"),
        ("workdir", "$HOME", "workdir: SkyPilot would replace $"),
        ("output_dir", "runs/a", "output_dir runs/a: it is not on a storage (/data)"),
        ("output_dir", "/data/../a", "it is not on a storage"),
        ("volumes", [], "it is not on a storage (there is none)"),
        ("volumes", [Storage("a", "/data"), Storage("b", "/data")], "volume: two storages at /data"),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        task(**{field: value})


def test_a_bucket_holds_the_run_folder_of_one_machine_only() -> None:
    bucket = {"volumes": [], "buckets": [Storage("s3://b", "/data")]}
    assert yaml.safe_load(task_file(task(**bucket)))["file_mounts"]["/data"]["mode"] == "MOUNT_CACHED"
    with pytest.raises(ConfigError, match="machines do not see each other's files in a bucket at once"):
        task(**bucket, nodes=2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--batch_sise", 2], "unknown flag --batch_sise; did you mean --batch_size"),
        (["--gpu-per-node", 2], "did you mean --gpus-per-node?"),
        (["--batch_size", 0], "batch_size: expected at least 1"),
        (["--gpus", 2], "gpus: the task sets it on each machine; use --gpus-per-node instead"),
        (["--node_rank", 0], "node_rank: the task sets it on each machine; use --nodes instead"),
        (["--gpus-per-node", "H100:2", "--nproc", 2], "nproc: a machine has one rank per GPU (H100:2)"),
        (["--nodes", "two"], "--nodes: expected a whole number, got 'two'"),
        (["--resume", "never"], "resume: never would prevent new machines from continuing"),
        (["--env", "HOME"], "env: expected NAME=VALUE, got 'HOME'"),
        (
            ["--env", "HF_TOKEN=abc"],
            "env: HF_TOKEN is a secret, which anybody who sees the file could read; pass --secret",
        ),
        (["--volume", "a b"], "volume: expected NAME[:/PATH], got 'a b'"),
        (["--volume", "a:/dev/shm"], "volume: expected the absolute path of a folder"),
        (["--volume", "a:/$HOME"], "volume: SkyPilot would replace $"),
        (["--bucket", "sets"], "bucket: expected s3://BUCKET[:/PATH], got 'sets'"),
        (["--bucket", "s3://me:pw@sets"], "bucket: expected s3://BUCKET[:/PATH]"),
        (["--config", "/etc/other.yaml"], "config file /etc/other.yaml cannot be read"),
        (["--output_dir", "/run"], "it is not on a storage"),
    ],
)
def test_a_user_error_is_found_before_anything_is_written(
    words: list[object], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(says)):
        skypilot_command([str(word) for word in [TINY, *NEEDED, "--output", "task.yaml", *words]])
    assert not list(tmp_path.iterdir())


def test_a_recipe_must_be_in_the_uploaded_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"tiny_recipe.py is not in \., the folder that is uploaded; pass --workdir"):
        skypilot_command([TINY, "--setup", "true", "--volume", "shared"])
    with pytest.raises(UserError, match="workdir none: there is no such folder"):
        skypilot_command([TINY, "--setup", "true", "--volume", "shared", "--workdir", "none"])


def test_a_task_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        TINY,
        *NEEDED,
        "--gpus-per-node",
        "H100:8",
        "--nodes",
        2,
        "--batch-size",
        2,
        "--spot",
        "--secret",
        "HF_TOKEN",
    ]
    arguments = [*map(str, words), "--output", "task.yaml"]
    assert skypilot_command(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out == "" and "sky jobs launch --secret HF_TOKEN task.yaml" in printed.err
    assert "task.yaml: tiny, 2 spot machines with H100:8 each, 32 samples per step" in printed.err
    assert "at most 1,000 steps since the last save are repeated" in printed.err
    (tmp_path / "task.yaml").write_text("mine")
    with pytest.raises(UserError, match=r"task.yaml already exists; pass --force to overwrite it, or another --output"):
        skypilot_command(arguments)
    assert (tmp_path / "task.yaml").read_text() == "mine"
    assert skypilot_command([*arguments, "--force"]) == 0
    assert "num_nodes: 2" in (tmp_path / "task.yaml").read_text()
