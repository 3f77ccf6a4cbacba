"""A temporarily full disk costs a run only the files that could not be written meanwhile."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import lines, losses
from command_line import unisono as command
from tiny_recipe import Tiny
from unisono.checkpoint.commit import read_best
from unisono.checkpoint.find import list_steps
from unisono.checkpoint.save import Best, Saver
from unisono.engine.memory.micro_batch_size import store_size, stored_size

needs_mounts = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")


@contextmanager
def small_disk(at: Path, size: str) -> Iterator[None]:
    """Mounts a small in-memory disk at a folder; skips the test if mounting is not allowed."""
    at.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.decode()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def fill_up(disk: Path) -> None:
    """Writes to a file on the disk until nothing more fits."""
    with open(disk / "filler", "ab", buffering=0) as file:
        while True:
            try:
                file.write(b"\0" * 4096)
            except OSError:
                return


class Filling(Tiny):
    """Rank 0 fills the run's disk before one micro-batch and frees it before a later one."""

    def loss(self, model: Any, batch: Any, noise: Any) -> Any:
        fill, free = map(int, os.environ["FULL_BETWEEN"].split())
        disk, saved = Path(os.environ["FULL_DISK"]), os.environ.get("FULL_AFTER")
        if os.environ.get("RANK", "0") == "0":
            if self.micro_batches == fill:
                while saved and not Path(saved).exists():  # saves run in the background
                    time.sleep(0.01)
                fill_up(disk)
            if self.micro_batches == free:
                (disk / "filler").unlink()
        return super().loss(model, batch, noise)

    def preview(self, model: Any, step: int) -> Any:
        return {"picture.txt": "x" * 5000}


def curve(folder: Path) -> dict[int, float]:
    """TensorBoard's loss curve; checks that each step occurs once."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    points = event_accumulator.EventAccumulator(str(folder / "tb")).Reload().Scalars("loss")
    assert len({point.step for point in points}) == len(points)
    return {point.step: point.value for point in points}


@needs_mounts
@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_records_delayed_by_a_full_disk_are_written_later(tmp_path: Path, nproc: int) -> None:
    disk, run = tmp_path / "disk", tmp_path / "disk" / "run"
    words = [
        "train",
        f"{__file__}:Filling",
        "--output_dir",
        run,
        "--max_steps",
        60,
        "--save_every",
        10,
        "--nproc",
        nproc,
    ]
    words += ["--tensorboard", "true", "--preview_every", 7, "--keep_last", 2]
    with small_disk(disk, "512k"):
        first_save = run / "checkpoints" / "step_00000010" / "manifest.json"
        when = {"FULL_DISK": str(disk), "FULL_AFTER": str(first_save), "FULL_BETWEEN": "15 45"}
        done = command(*words, cwd=tmp_path, **when)
        assert done.code == 0, done.err
        assert done.err.count("stores the records in memory") == done.err.count("is writable again") >= 2, done.err
        assert losses(run) and {line["step"] for line in lines(run)} == set(range(1, 61))
        assert curve(run) == pytest.approx(dict(enumerate(losses(run), 1)))
        events = lines(run, "events.jsonl")
        assert [line["step"] for line in events if line["kind"] == "save"] == [10, 50, 60]
        assert [line["step"] for line in events if line["kind"] == "save_failed"] == [20, 30, 40]
        assert [line["step"] for line in events if line["kind"] == "preview_left_out"] == [21, 28, 35, 42]
        assert not [line for line in events if line["kind"] in ("restart", "failed")]
    assert "Traceback" not in done.err


@pytest.mark.slow
@needs_mounts
def test_a_disk_that_stays_full_costs_log_lines_but_not_the_run(tmp_path: Path) -> None:
    disk, run = tmp_path / "disk", tmp_path / "disk" / "run"
    with small_disk(disk, "256k"):
        run.mkdir()
        (tmp_path / "scratch").mkdir()
        (run / "checkpoints").symlink_to(tmp_path / "scratch")
        words = ["train", f"{__file__}:Filling", "--output_dir", run, "--max_steps", 60, "--tensorboard", "true"]
        done = command(*words, cwd=tmp_path, FULL_DISK=str(disk), FULL_BETWEEN="5 1000")
        assert done.code == 0, done.err
    assert "Traceback" not in done.err and "done after step 60" in done.err
    assert done.err.count("stores the records in memory") == done.err.count("the last ") > 1


def test_a_best_checkpoint_that_cannot_be_marked_is_not_deleted_and_is_marked_later(tmp_path: Path) -> None:
    saver = Saver(tmp_path, rank=0, world=1, group=None, keep_last=1, asynchronous=False, identity={"recipe": "Tiny"})

    def save(step: int, best: Best | None = None) -> str | None:
        saver.save(step, {"model.a": torch.full((4,), float(step))}, {}, best=best)
        [result] = saver.wait()
        assert result.path is not None
        return result.error

    def steps() -> list[int]:
        return [step for step, _ in list_steps(tmp_path)]

    assert save(1) is None
    (tmp_path / ".best.json.new").mkdir()  # blocks the new file, like a full disk
    assert "best.json" in (save(2, Best("loss", 0.5)) or "")
    assert "best.json" in (save(3) or "") and read_best(tmp_path) is None
    assert steps() == [2, 3], "the best is kept, and older ones still make room"
    (tmp_path / ".best.json.new").rmdir()
    assert save(4) is None
    assert read_best(tmp_path) == {"step": 2, "metric": "loss", "value": 0.5} and steps() == [2, 4]


@needs_mounts
def test_if_the_note_for_the_next_attempt_cannot_be_written_a_warning_is_printed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", "64k"):
        fill_up(tmp_path / "disk")
        store_size(tmp_path / "disk", 2)
        assert stored_size(tmp_path / "disk") is None and os.listdir(tmp_path / "disk") == ["filler"]
        assert "memory.json cannot be written (No space left on device)" in caplog.text
        (tmp_path / "disk" / "filler").unlink()
        store_size(tmp_path / "disk", 2)
        assert stored_size(tmp_path / "disk") == 2
