"""The run folder, banner, trackers and timings of a run."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.engine.start.banner import _devices
from unisono.errors import UserError
from unisono.observe.append_only_file import AppendOnlyFile
from unisono.observe.banner import banner, effective_batch_text
from unisono.observe.folder import RunFolder, append_event, check_writable
from unisono.observe.meter import Meter, gpu_memory_gib, host_memory_gib, slowest
from unisono.observe.trackers.tensorboard import TensorBoardTracker, open_tensorboard
from unisono.settings import ObserveSettings

RECORD = {"recipe": "darkroom", "config": {"learning_rate": 1e-3}, "seed": 0, "global_batch": 64, "versions": {}}
START = {"world": 2, "strategy": "ddp", "launcher": "plain", "why": "new run", "from_step": 0}


def jsonl(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@contextmanager
def nothing_can_be_written() -> Iterator[None]:
    """Forbids files of this process to grow, which acts like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], text=True, stdout=subprocess.PIPE)


# --- the folder


def test_records_are_buffered_until_the_folder_is_opened(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "one")
    folder.event("start", rank=0, world=2)
    folder.metrics({"step": 1, "loss": 2.5})
    folder.add_start(**START)
    folder.rewind_metrics(5)
    assert list(tmp_path.iterdir()) == []

    folder.open(RECORD)
    folder.metrics({"step": 2, "loss": 2.0})
    assert [line["step"] for line in jsonl(folder.path / "metrics.jsonl")] == [1, 2]
    (event,) = jsonl(folder.path / "events.jsonl")
    assert (event["kind"], event["step"], event["rank"], event["world"]) == ("start", None, 0, 2)
    run = RunFolder.read(folder.path)
    assert run is not None and run["recipe"] == "darkroom" and run["created"]
    assert [start["world"] for start in run["starts"]] == [2]
    assert sorted(file.name for file in folder.path.glob("[!.]*")) == ["events.jsonl", "metrics.jsonl", "run.json"]


def test_a_folder_that_is_never_opened_uses_little_memory(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for step in range(5000):
        folder.metrics({"step": step})
    folder.close()
    assert list(tmp_path.iterdir()) == []
    assert len(folder._pending) <= 1000


def test_a_resumed_run_keeps_its_history_and_shows_its_newest_config(tmp_path: Path) -> None:
    first = RunFolder(tmp_path)
    first.add_start(**START)
    first.open(RECORD)
    created = RunFolder.read(tmp_path)["created"]  # type: ignore[index]
    with pytest.raises(UserError, match="another run is writing"):
        RunFolder(tmp_path).open(RECORD)
    first.close()
    time.sleep(0.002)

    again = RunFolder(tmp_path)
    again.open({**RECORD, "config": {"learning_rate": 5e-4}})
    again.add_start(**{**START, "world": 3, "why": "resume", "from_step": 7})
    run = RunFolder.read(tmp_path)
    assert run is not None
    assert run["created"] == created
    assert run["config"] == {"learning_rate": 5e-4}
    assert [(start["world"], start["why"], start["from_step"]) for start in run["starts"]] == [
        (2, "new run", 0),
        (3, "resume", 7),
    ]


def test_nan_and_infinity_are_written_as_text(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.open({**RECORD, "config": {"grad_clip": float("inf"), "data": Path("a/b")}})
    folder.metrics({"step": 1, "loss": float("nan"), "per_rank": [float("inf"), -float("inf"), 1.5]})
    folder.event("nan", step=1, error=ValueError("bad"), name="\udcff")
    (line,) = jsonl(tmp_path / "metrics.jsonl")
    assert line == {"step": 1, "loss": "nan", "per_rank": ["inf", "-inf", 1.5]}
    assert jsonl(tmp_path / "events.jsonl")[0]["error"] == "bad"
    assert RunFolder.read(tmp_path)["config"] == {"grad_clip": "inf", "data": "a/b"}  # type: ignore[index]
    with pytest.raises(TypeError):
        folder.metrics({"step": 2, "loss": object()})


def test_after_a_rewind_each_step_occurs_once_even_in_a_damaged_file(tmp_path: Path) -> None:
    first = RunFolder(tmp_path)
    first.open(RECORD)
    for step in range(1, 9):
        first.metrics({"step": step, "loss": 1.0})
    first.metrics({"step": 4, "eval/loss": 0.5})
    first.close()
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'\0\0\0\xff\n[1, 2]\n\n{"step": 3, "loss": "torn')

    again = RunFolder(tmp_path)
    again.rewind_metrics(4)
    assert len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) > 8  # the folder is not open, so nothing changed
    again.metrics({"step": 5, "loss": 2.0})
    again.open(RECORD)
    again.metrics({"step": 6, "loss": 2.0})
    lines = jsonl(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4, 5, 6]
    assert [line["loss"] for line in lines if line["step"] > 4] == [2.0, 2.0]

    again.rewind_metrics(5)  # also while the file is in use
    again.metrics({"step": 6, "loss": 3.0})
    assert [line.get("loss") for line in jsonl(tmp_path / "metrics.jsonl")][-2:] == [2.0, 3.0]


def test_a_record_after_an_incomplete_line_starts_on_a_new_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.open(RECORD)
    (tmp_path / "events.jsonl").write_text('{"kind": "sa')
    folder.event("resume", step=3)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert lines[0] == '{"kind": "sa' and json.loads(lines[1])["kind"] == "resume"


def test_lines_of_two_processes_do_not_mix(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.open(RECORD)
    code = """
import sys
from unisono.observe.folder import append_event
for number in range(300):
    append_event(sys.argv[1], "restart", rank=int(sys.argv[2]), number=number, why="x" * 3000)
"""
    processes = [python(code, tmp_path, rank) for rank in (1, 2)]
    for number in range(300):
        folder.event("save", step=number, rank=0, why="y" * 3000)
    assert [process.wait() for process in processes] == [0, 0]
    events = jsonl(tmp_path / "events.jsonl")
    assert sorted(event["rank"] for event in events) == [0] * 300 + [1] * 300 + [2] * 300


def test_a_killed_run_has_written_every_recorded_line(tmp_path: Path) -> None:
    code = """
import sys, time
from unisono.observe.folder import RunFolder
folder = RunFolder(sys.argv[1])
folder.open({})
for step in range(1, 51):
    folder.metrics({"step": step})
print("noted", flush=True)
time.sleep(60)
"""
    process = python(code, tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "noted\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert [line["step"] for line in jsonl(tmp_path / "metrics.jsonl")] == list(range(1, 51))


def test_the_launcher_writes_events_only_into_an_existing_run(tmp_path: Path) -> None:
    append_event(tmp_path / "missing", "restart")
    append_event(tmp_path, "restart")
    assert list(tmp_path.iterdir()) == []
    RunFolder(tmp_path).open(RECORD)
    append_event(tmp_path, "restart", rank=1, attempt=2)
    assert jsonl(tmp_path / "events.jsonl")[0]["attempt"] == 2


def test_an_unwritable_file_loses_no_line_and_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path)
    folder.open(RECORD)
    file = tmp_path / "metrics.jsonl"
    with nothing_can_be_written():
        folder.metrics({"step": 1})
        folder.metrics({"step": 2})
    assert [record.message for record in caplog.records] == [
        f"{file} cannot be written (File too large); the run continues and stores the records in memory"
    ]
    folder.metrics({"step": 3})
    assert [line["step"] for line in jsonl(file)] == [1, 2, 3]
    assert caplog.records[-1].message == f"{file} is writable again; all records stored in memory were written"


def test_an_incomplete_line_of_another_process_does_not_damage_the_next(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.open(RECORD)
    folder.event("start")
    with open(tmp_path / "events.jsonl", "a") as other:  # while the folder has the file open
        other.write('{"kind": "rest')
    folder.event("resume", step=3)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert lines[1] == '{"kind": "rest' and json.loads(lines[2])["kind"] == "resume"


def test_a_rewind_includes_lines_that_are_still_buffered(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.open(RECORD)
    file = tmp_path / "metrics.jsonl"
    with nothing_can_be_written():
        for step in (1, 2, 3):
            folder.metrics({"step": step})
    folder.rewind_metrics(1)
    folder.metrics({"step": 2})
    assert [line["step"] for line in jsonl(file)] == [1, 2]


def test_memory_for_buffered_lines_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("unisono.observe.append_only_file.MAX_PENDING", 3)
    file = tmp_path / "lines"
    lines = AppendOnlyFile(file)
    with nothing_can_be_written():
        for number in range(6):
            lines.append(str(number).encode())
    lines.append(b"6")
    assert file.read_text() == "0\n5\n6\n" and "except 4 that were dropped" in caplog.records[-1].message


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"name": "mine"}', '{"starts": 3}', "\xff"])
def test_a_damaged_run_json_is_a_user_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"run\.json is damaged .*--output_dir"):
        RunFolder.read(tmp_path)
    with pytest.raises(UserError):
        RunFolder(tmp_path).open(RECORD)
    assert (tmp_path / "run.json").read_bytes() == text.encode("latin-1")


def test_reading_a_folder_without_a_run_returns_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert RunFolder.read(tmp_path) is None
    assert RunFolder.read(tmp_path / "missing") is None
    assert RunFolder.read(tmp_path / "file") is None


def test_a_folder_that_can_be_written_passes_and_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("mine\n")
    before = sorted(tmp_path.iterdir())
    check_writable(tmp_path)
    check_writable(tmp_path / "a" / "b" / ".." / "c")
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "metrics.jsonl").read_text() == "mine\n"


def test_folders_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    bad = [tmp_path / "file", tmp_path / "file" / "run", tmp_path / "link" / "run", tmp_path / ("x" * 300), "a\0b"]
    if sys.platform == "linux":
        bad.append("/proc/unisono/run")  # not even root can make a folder there
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        bad.append(tmp_path / "closed" / "run")
    before = sorted(tmp_path.iterdir())
    for path in bad:
        with pytest.raises(UserError, match="--output_dir") as refused:
            check_writable(path)
        assert "\n" not in str(refused.value)
    assert sorted(tmp_path.iterdir()) == before


# --- the banner


def test_the_banner_aligns_and_wraps_its_rows() -> None:
    devices = "cuda:0 NVIDIA H200 " * 12
    lines = {"recipe": "darkroom", "strategy": "ddp\nfits on each GPU", "devices": devices.strip()}
    text = banner(lines, "unisono 0.1.0")
    rows = text.split("\n")
    assert rows[0].startswith("── unisono 0.1.0 ──") and set(rows[-1]) == {"─"}
    assert len(rows[0]) == len(rows[-1]) == max(map(len, rows))
    assert rows[1:5] == [
        "recipe     darkroom",
        "strategy   ddp",
        "           fits on each GPU",
        "devices    " + rows[4][11:],
    ]
    assert "".join(row[11:] + " " for row in rows[4:-1]) == devices
    assert len(rows) > 6 and max(map(len, rows)) <= 100


@pytest.mark.parametrize(("threads", "text"), [(1, "CPU, 1 thread per process"), (2, "CPU, 2 threads per process")])
def test_the_banner_uses_singular_and_plural_for_threads(
    threads: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert _devices([torch.device("cpu")]) == text


def test_the_banner_never_breaks_a_path() -> None:
    path = "/data/" + "x-y" * 60
    assert path in banner({"folder": path}, "unisono")


def test_the_effective_batch_shows_its_factors() -> None:
    assert effective_batch_text(64, 8, 2, 4) == "64 = 8 per GPU × 2 GPUs × 4 accumulation"
    assert effective_batch_text(8, 8, 1, 1, device="CPU") == "8 = 8 per CPU × 1 CPU × 1 accumulation"
    assert effective_batch_text(7, 2, 2, 2) == "7 = up to 2 per GPU × 2 GPUs × 2 accumulation"
    with pytest.raises(ValueError, match="8 samples are fewer than the batch of 9"):
        effective_batch_text(9, 2, 2, 2)


# --- trackers


def test_tensorboard_has_each_step_once_after_a_resume(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = TensorBoardTracker(tmp_path / "tb")
    for step in range(1, 9):
        first.log(step, {"step": step, "loss": 1.0, "note": "text is passed over", "mem_gib": None})
    first.close()
    again = open_tensorboard(ObserveSettings(), tmp_path, step=5)
    assert again is not None
    for step in range(6, 8):
        again.log(step, {"loss": 2.0, "eval/loss": 3})
    again.close()

    seen = event_accumulator.EventAccumulator(str(tmp_path / "tb")).Reload()
    assert sorted(seen.Tags()["scalars"]) == ["eval/loss", "loss"]
    curve = [(point.step, point.value) for point in seen.Scalars("loss")]
    assert curve == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 1.0), (6, 2.0), (7, 2.0)]


def test_previews_are_in_tensorboard_as_pictures_and_texts(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    image = pytest.importorskip("PIL.Image")
    files = [tmp_path / f"step_00000007_{name}" for name in ("a.png", "b.gif", "c.txt", "d.mp4", "gone.png")]
    image.new("RGB", (30, 20)).save(files[0])
    image.new("RGB", (12, 8)).save(files[1])
    files[2].write_text("a red circle\n")
    files[3].write_bytes(b"no picture")
    tracker = TensorBoardTracker(tmp_path / "tb")
    for file in files:
        tracker.show(7, file)
    tracker.close()

    seen = event_accumulator.EventAccumulator(str(tmp_path / "tb")).Reload()
    assert sorted(seen.Tags()["images"]) == ["previews/a", "previews/b"]
    assert seen.Tags()["tensors"] == ["previews/c"]
    [picture] = seen.Images("previews/a")
    assert (picture.step, picture.width, picture.height) == (7, 30, 20)
    assert picture.encoded_image_string == files[0].read_bytes()
    assert seen.Images("previews/b")[0].width == 12
    assert seen.Tensors("previews/c")[0].tensor_proto.string_val == [b"    a red circle"]


def test_without_tensorboard_there_is_a_warning_and_no_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_tensorboard(ObserveSettings(tensorboard=False), tmp_path, step=0) is None
    assert not caplog.records
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)  # importing it raises ImportError
    assert open_tensorboard(ObserveSettings(), tmp_path, step=0) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert list(tmp_path.iterdir()) == []


# --- the meter


class Clock:
    """A clock for the meter that the test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("unisono.observe.meter.perf_counter", lambda: self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_the_meter_measures_the_phases_without_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, meter = Clock(monkeypatch), Meter()
    clock.wait(0.2)  # before the first phase, so not part of any step
    for _ in range(4):
        with meter.phase("data"):
            clock.wait(0.01)
        clock.wait(0.002)  # part of the step, but not of a phase
        with meter.phase("step"), meter.phase("forward"):
            clock.wait(0.02)
    with meter.phase("aside"):
        clock.wait(0.3)
    numbers = meter.interval(samples=400)
    assert numbers["data_wait_ms"] == pytest.approx(10)
    assert numbers["forward_ms"] == pytest.approx(20)
    assert numbers["step_ms"] == pytest.approx(32)
    assert numbers["samples_per_s"] == pytest.approx(100 / 0.032)
    assert meter.interval(samples=0) == {}

    with meter.phase("step"):
        pass
    assert meter.interval(samples=1)["data_wait_ms"] == 0.0


def test_a_replayed_step_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, meter = Clock(monkeypatch), Meter()
    with pytest.raises(MemoryError), meter.phase("step"):
        clock.wait(0.02)
        raise MemoryError
    with meter.phase("step"):
        clock.wait(0.02)
    assert meter.interval(samples=8)["step_ms"] == pytest.approx(40)


def test_a_phase_costs_less_than_two_microseconds() -> None:
    meter = Meter()
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(1000):
            with meter.phase("data"):
                pass
        best = min(best, (time.perf_counter() - began) / 1000)
    assert best < 2e-6


def test_the_slowest_rank_is_named() -> None:
    assert slowest([10.0, 30.0]) == (1, 3.0)
    assert slowest([10.0, 12.0, 11.0, 22.0]) == (3, 2.0)
    assert slowest([5.0]) == (0, 1.0)
    assert slowest([0.0, 0.0]) == (0, 1.0)
    assert slowest([0.0, 1.0]) == (1, float("inf"))


def test_memory_is_reported_in_gib() -> None:
    import torch

    assert gpu_memory_gib(torch.device("cpu")) is None
    assert 0.02 < host_memory_gib() < 100
