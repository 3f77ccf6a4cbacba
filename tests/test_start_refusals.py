"""A start that cannot succeed is refused at once, in one line, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import unisono
from command_line import TINY, environment
from tiny_recipe import Tiny
from unisono.checkpoint.find import is_step
from unisono.cluster.launch.job_folder import job_folder, remove_abandoned
from unisono.cluster.launch.launcher import _rendezvous_config
from unisono.devices import choose
from unisono.engine.checks import machines
from unisono.engine.start.device_plan import plan_devices
from unisono.engine.start.run import configure
from unisono.engine.state import TrainState
from unisono.errors import ConfigError, UserError
from unisono.settings import LaunchSettings

HUGE = 2**40


def train(folder: Path, **settings: Any) -> Any:
    return unisono.train(TINY, output_dir=str(folder), gpus="0", **settings)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max_steps", "10**30"], r"max_steps: expected a whole number or none, got '10\*\*30'"),
        (["--max_steps", "1" + 30 * "0"], "max_steps: expected 1 to 1,099,511,627,776, got 1000"),
        (["--num_workers", "2147483648"], "num_workers: expected 0 to 1,024, got 2147483648"),
        (["--max_steps", "0"], "max_steps: expected at least 1, got 0"),
        (["--hang_timeout", "inf"], "hang_timeout: expected 0 to 1,099,511,627,776, got inf"),
        (["--batch_size", str(HUGE)], "batch_size: expected 1 to 4,294,967,296, got 1099511627776"),
        (["--global_batch_size", str(HUGE)], "global_batch_size: expected 1 to 4,294,967,296"),
        (["--micro_batch", "0"], "micro_batch: expected at least 1, got 0"),
    ],
)
def test_an_error_about_a_number_out_of_range_gives_the_range(flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        unisono.engine.start.run.start(Tiny, configure(Tiny, flags=[*flags, "--output_dir", str(tmp_path / "run")]))  # type: ignore[attr-defined]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["batch_size", "global_batch_size"])
def test_a_global_batch_of_many_epochs_is_rejected_with_numbers(name: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"step of 4,294,967,296 samples would read the dataset \(24 samples\) 178,9"):
        train(tmp_path / "run", **{name: 2**32})
    assert time.monotonic() - began < 60 and not any(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="the effective batch would be 8,589,934,592 samples"):
        train(tmp_path / "run", batch_size=2**32, gradient_accumulation_steps=2)


def test_a_huge_batch_in_a_checkpoint_is_damage() -> None:
    state = TrainState(8).to_json()
    with pytest.raises(UserError, match="'global_batch' cannot be 1099511627776"):
        TrainState.from_json({**state, "global_batch": HUGE})


def test_far_more_ranks_than_cores_are_refused() -> None:
    cores = len(os.sched_getaffinity(0))
    with pytest.raises(ConfigError, match=rf"nproc 100000: this machine has {cores} core.*--max_ranks_per_core \d+$"):
        plan_devices(configure(Tiny, flags=["--nproc", "100000"]))
    insisted = ["--nproc", str(8 * cores + 1), "--max_ranks_per_core", "9"]
    assert plan_devices(configure(Tiny, flags=insisted)).ranks == 8 * cores + 1


def test_a_gpu_that_was_not_requested_is_not_named_in_an_error() -> None:
    assert choose("1", []).warnings == choose("auto", []).warnings == ("no CUDA device: training on the CPU",)
    assert choose("4", []).warnings == ("no CUDA device for --gpus 4: training on the CPU",)


# ---- leftover files ----


class Prepares(Tiny):
    """A recipe whose prepare() fails."""

    kind: type[BaseException] = ValueError
    leaves = False

    def prepare(self, work: Any) -> None:
        (work.folder / "pieces" / "of work").mkdir(parents=True)
        if self.leaves:
            (work.folder / "pieces" / "one.json").write_text("{}")
        raise self.kind("half-way")


@pytest.mark.parametrize("kind", [ValueError, UserError, KeyboardInterrupt])
def test_a_prepare_that_fails_leaves_no_empty_folder(kind: type[BaseException], tmp_path: Path) -> None:
    recipe = type("Prepares", (Prepares,), {"kind": kind, "__module__": __name__})
    with pytest.raises(kind, match="half-way"):
        unisono.train(recipe, output_dir=str(tmp_path / "runs" / "run"), gpus="0")
    assert not any(tmp_path.iterdir())


def test_finished_work_of_prepare_and_existing_folders_stay(tmp_path: Path) -> None:
    recipe = type("Prepares", (Prepares,), {"leaves": True, "__module__": __name__})
    with pytest.raises(ValueError, match="half-way"):
        unisono.train(recipe, output_dir=str(tmp_path / "run"), gpus="0")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == [
        "run/prepared/pieces/one.json"
    ]
    (tmp_path / "mine" / "prepared").mkdir(parents=True)
    with pytest.raises(ValueError, match="half-way"):
        unisono.train(Prepares, output_dir=str(tmp_path / "mine"), gpus="0")
    assert (tmp_path / "mine" / "prepared").is_dir()


LAUNCHER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from unisono.cluster.launch.job_folder import job_folder
with job_folder() as folder:
    (folder / "job.json").write_text("{}")
    print(folder, flush=True)
    sys.stdin.readline()
"""


def launcher_in(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    words = [sys.executable, "-c", LAUNCHER, str(temporary)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_next_start_removes_the_folder_of_a_killed_launcher_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "unisono-mine").mkdir()
    (tmp_path / "unisono-mine" / "notes.txt").write_text("a user's own folder")
    (tmp_path / "unisono-link").symlink_to(tmp_path / "unisono-mine")
    living, its_folder = launcher_in(tmp_path)
    killed, abandoned = launcher_in(tmp_path)
    try:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert abandoned.is_dir(), "nobody was there to remove it"
        with job_folder() as own:
            names = {path.name for path in tmp_path.iterdir()}
            assert names == {own.name, its_folder.name, "unisono-mine", "unisono-link"}
            remove_abandoned()
            assert (own / ".unisono-launcher").exists() and (its_folder / "job.json").exists()
    finally:
        living.communicate("\n")
    assert {path.name for path in tmp_path.iterdir()} == {"unisono-mine", "unisono-link"}


@pytest.mark.parametrize("nnodes", ["9" * 5000, "1:" + "9" * 5000, "0", "1:2:3", "4:1", "\uff12"])
def test_an_invalid_number_of_machines_is_refused_in_one_line(nnodes: str) -> None:
    with pytest.raises(ConfigError, match=r"^nnodes: expected") as told:
        machines(LaunchSettings(nnodes=nnodes))
    assert len(str(told.value)) < 200


@pytest.mark.parametrize("request_", ["9" * 5000, "²", "0," + "9" * 5000])
def test_gpus_that_no_machine_can_have_are_refused_in_one_line(request_: str) -> None:
    with pytest.raises(UserError, match=r"^gpus .* is not all, auto, a count"):
        choose(request_, [])


@pytest.mark.parametrize("endpoint", ["node0:" + "9" * 5000, "node0:0", "node 0:29400", "\udcff:29400", "node0:²"])
def test_an_endpoint_that_no_machine_can_find_is_refused(endpoint: str) -> None:
    with pytest.raises(UserError, match=r"^rdzv_endpoint .* is not host:port"):
        _rendezvous_config(2, 2, 1, endpoint, 1)


@pytest.mark.parametrize(("text", "answer"), [("12", True), ("²", False), ("9" * 5000, False), ("-1", False)])
def test_a_step_number_must_consist_of_ascii_digits(text: str, answer: bool) -> None:
    assert is_step(text) is answer
