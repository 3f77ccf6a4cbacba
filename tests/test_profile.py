"""`--profile` writes traces, tables and pictures of some steps, and a run with it is the same run."""

from __future__ import annotations

import gzip
import json
import os
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from browser import CHROMIUM, Browser
from command_line import TINY, lines
from command_line import unisono as command
from many_runs import Outcome, Run, identical, many_runs
from ranks import run_ranks
from tiny_recipe import Tiny
from unisono.cli.main import main
from unisono.engine import profiling
from unisono.errors import ConfigError
from unisono.observe.profile.intervals import difference, intersection, length, union
from unisono.observe.profile.read import newest_profile
from unisono.observe.profile.spec import ProfileSpec, parse_profile
from unisono.observe.profile.summary import as_text, rank_summary, summary
from unisono.observe.profile.tables import self_times
from unisono.observe.profile.trace import Span, read_trace

SAME = {"max_steps": 9, "global_batch_size": 12, "batch_size": 6, "log_every": 1, "deterministic": True}
# name -> ranks, settings, flags of the profile
WAYS: dict[str, tuple[int, dict[str, Any], str]] = {
    "single": (1, {"strategy": "single"}, "steps=3,memory"),
    "ddp": (2, {"strategy": "ddp", "guard_steps": 1}, "steps=3,memory"),
    "fsdp": (2, {"strategy": "fsdp"}, "steps=3,start=4"),
    "accumulation": (2, {"strategy": "ddp", "batch_size": 2}, "steps=2,start=5"),
    "evaluation between": (1, {"eval_every": 1, "save_every": 2, "batch_size": 3}, "steps=4,start=3"),
    "out of memory": (2, {"strategy": "ddp", "guard_steps": -1, "inject": "oom@rank1:step5"}, "steps=3,start=4"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Every way without and with a profile, in the same processes."""
    planned = []
    for name, (world, more, profile) in WAYS.items():
        settings = {**SAME, **more}
        planned += [Run(name, name, world, settings)]
        planned += [Run(f"{name}, profiled", f"{name}, profiled", world, {**settings, "profile": profile})]
    first = {**SAME, "strategy": "ddp", "max_steps": 5, "profile": "steps=2,start=3"}
    planned += [Run("first start", "two starts", 2, first)]
    planned += [Run("second start", "two starts", 2, {**first, "max_steps": 9, "profile": "steps=2"})]
    planned += [
        Run("without the flag", "two starts", 1, {**first, "strategy": "single", "max_steps": 11, "profile": None})
    ]
    planned += [Run("cut short", "cut short", 2, {**SAME, "strategy": "ddp", "profile": "steps=50,start=8"})]
    planned += [Run("never", "never", 1, {**SAME, "profile": "steps=5,start=50"})]
    return many_runs(planned, tmp_path_factory.mktemp("profiles"))


def folders(outcome: Outcome) -> list[str]:
    return sorted(path.name for path in (outcome.folder / "profile").iterdir())


def summary_of(outcome: Outcome, name: str) -> dict[str, Any]:
    return dict(json.loads((outcome.folder / "profile" / name / "summary.json").read_text()))


def trace_of(folder: Path, rank: int) -> dict[str, Any]:
    return dict(json.loads(gzip.decompress((folder / f"rank_{rank}.json.gz").read_bytes())))


@pytest.mark.parametrize("way", WAYS)
def test_a_profiled_run_has_the_same_losses_and_weights_bit_for_bit(way: str, runs: dict[str, Outcome]) -> None:
    plain, profiled = runs[way], runs[f"{way}, profiled"]
    assert len(plain.losses()) == 9 and torch.equal(plain.losses(), profiled.losses())
    assert identical(plain.weights(), profiled.weights())
    assert not (plain.folder / "profile").exists()


@pytest.mark.parametrize("way", WAYS)
def test_every_rank_has_its_own_trace_of_exactly_these_steps(way: str, runs: dict[str, Outcome]) -> None:
    world, _, profile = WAYS[way]
    spec = parse_profile(profile)
    assert spec is not None
    [name] = folders(runs[f"{way}, profiled"])
    content, folder = summary_of(runs[f"{way}, profiled"], name), runs[f"{way}, profiled"].folder / "profile" / name
    first, last = (int(number) for number in name.removeprefix("steps_").split("-"))
    assert last - first + 1 == spec.steps and (spec.start is None or first == spec.start)
    processes = set()
    for rank in range(world):
        trace = read_trace(raw := trace_of(folder, rank))
        assert sorted({number for number, _ in trace.steps}) == list(range(first, last + 1))
        assert {"data", "forward", "backward", "optimizer"} <= {mark.name for mark in trace.marks}
        assert any(operator.name == "aten::mm" or "linear" in operator.name for operator in trace.operators)
        processes.add(next(event["pid"] for event in raw["traceEvents"] if event.get("cat") == "cpu_op"))
    assert len(processes) == world
    assert [each["rank"] for each in content["ranks"]] == list(range(world))
    assert (content["first_step"], content["last_step"], content["world"]) == (first, last, world)
    assert not list(folder.glob(".*")), "a temporary file was left"


def test_the_parts_of_a_step_add_up_and_the_text_shows_the_tables(runs: dict[str, Outcome]) -> None:
    outcome = runs["ddp, profiled"]
    [name] = folders(outcome)
    content = summary_of(outcome, name)
    for rank in content["ranks"]:
        assert sum(rank["host_ms"].values()) == pytest.approx(rank["step_ms"], rel=0.01)
        assert len(rank["steps_ms"]) == 3 and rank["host_ms"]["communication"] > 0
    assert sum(row["cpu_share"] for row in content["operators"]) <= 1.001
    text = (outcome.folder / "profile" / name / "summary.txt").read_text()
    assert text == as_text(content) and content["operators"][0]["name"][:40] in text
    assert content["kernels"] == [] and content["unprofiled_step_ms"] > 0


def test_memory_has_a_curve_a_peak_and_the_blocks_at_the_peak(runs: dict[str, Outcome]) -> None:
    for way, world in (("single", 1), ("ddp", 2)):
        outcome = runs[f"{way}, profiled"]
        folder = outcome.folder / "profile" / folders(outcome)[0]
        for rank in range(world):
            memory = json.loads((folder / f"memory_rank_{rank}.json").read_text())
            assert max(level for _, level in memory["points"]) == memory["peak_bytes"] > 0
            assert 0 < sum(block["bytes"] for block in memory["blocks"]) <= memory["peak_bytes"] * 1.5
            assert [time for time, _ in memory["points"]] == sorted(time for time, _ in memory["points"])
            assert (folder / f"memory_rank_{rank}.svg").read_text().startswith("<svg ")
    assert not list(runs["fsdp, profiled"].folder.rglob("memory_rank_*")), "memory was not requested"


def test_a_later_start_writes_another_folder_and_inherits_no_profile(runs: dict[str, Outcome]) -> None:
    first, last = runs["first start"], runs["without the flag"]
    assert folders(last)[0] == "steps_3-4" and len(folders(last)) == 2
    assert [event["folder"] for event in last.events("profile")] == [f"profile/{name}" for name in folders(last)]
    assert summary_of(first, "steps_3-4")["world"] == 2
    assert last.main["step"] == 11


def test_a_profile_that_the_end_of_the_run_cuts_short_has_all_ranks(runs: dict[str, Outcome]) -> None:
    assert folders(runs["cut short"]) == ["steps_8-9"]
    content = summary_of(runs["cut short"], "steps_8-9")
    assert content["num_steps"] == 2 and len(content["ranks"]) == 2 and content["notes"] == []
    assert not (runs["never"].folder / "profile").exists()


class Waiting(Tiny):
    """Reads slowly, and allocates 8 MiB in its loss."""

    def dataset(self, split: str) -> Any:
        return None if split == "eval" else SlowPoints()

    def loss(self, model: Any, batch: Any, noise: Any) -> Any:
        large = torch.ones(2 * 2**20)
        loss = super().loss(model, batch, noise)
        return unisono.Loss(loss.total + 0 * large.sum(), loss.count)


class SlowPoints:
    """Twenty-four points that take 10 ms each to read."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[float, float]:
        import time

        time.sleep(0.01)
        return index / 10, index / 5


def test_python_gets_the_tables_and_the_wait_for_data_and_the_largest_block_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = unisono.train(Waiting, output_dir=tmp_path / "run", max_steps=8, profile="steps=3,memory")
    profile = result.profile
    assert profile is not None and profile.folder == tmp_path / "run/profile/steps_6-8"
    [rank] = profile.summary["ranks"]
    assert rank["host_ms"]["data"] >= 40 and rank["host_ms"]["data"] > 0.4 * rank["step_ms"]
    block = profile.summary["memory"]["blocks"][0]
    assert block["bytes"] == 8 * 2**20 and block["phase"] == "forward" and block["operator"].startswith("aten::")
    assert profile.summary["memory"]["peak_bytes"] >= 8 * 2**20
    assert "Where the step waits" in str(profile) and "aten::" in str(profile)
    assert "profiled steps 6 to 8" in capsys.readouterr().err
    assert unisono.train(Tiny, output_dir=tmp_path / "other").profile is None


def test_a_rank_that_is_slow_is_visible_in_the_waits_of_the_other(tmp_path: Path) -> None:
    words = ["train", TINY, "--nproc", "2", "--strategy", "ddp", "--max_steps", "8", "--output_dir", "run"]
    ended = command(*words, "--profile", "steps=3", "--inject", "slow@rank1:step2:forward:0.08s", cwd=tmp_path)
    assert ended.code == 0, ended.err
    profile = newest_profile(tmp_path / "run")
    assert profile is not None and f"run/profile/{profile.folder.name}" in ended.err
    fast, slow = (rank["host_ms"] for rank in profile.summary["ranks"])
    assert slow["forward"] >= 80 and fast["communication"] >= 60 > fast["forward"]


def test_a_killed_rank_restarts_and_both_starts_have_their_profile(tmp_path: Path) -> None:
    words = ["train", TINY, "--nproc", "2", "--strategy", "ddp", "--max_steps", "14", "--output_dir", "run"]
    more = ["--save_every", "2", "--profile", "steps=1", "--inject", "kill@rank1:step10", "--guard_steps", "0"]
    ended = command(*words, *more, cwd=tmp_path)
    assert ended.code == 0, ended.err
    profiles = sorted(path.name for path in (tmp_path / "run/profile").iterdir())
    assert len(profiles) == 2 and "steps_4-4" in profiles, profiles
    for name in profiles:
        assert {"rank_0.json.gz", "rank_1.json.gz", "summary.json"} <= {
            path.name for path in (tmp_path / "run/profile" / name).iterdir()
        }
    assert len([line for line in lines(tmp_path / "run") if "loss" in line]) == 14


def test_the_same_steps_twice_are_two_folders(tmp_path: Path) -> None:
    for _ in range(2):
        unisono.train(Tiny, output_dir=tmp_path / "run", max_steps=4, profile="steps=1,start=3", save_every=0)
        (tmp_path / "run/checkpoints").rename(tmp_path / f"aside-{len(list(tmp_path.iterdir()))}")
    assert sorted(path.name for path in (tmp_path / "run/profile").iterdir()) == ["steps_3-3", "steps_3-3-2"]


def test_a_run_without_the_flag_executes_the_plain_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "ProfilingRecorder", None)  # creating one would fail
    assert unisono.train(Tiny, output_dir=tmp_path / "run").step == 4


def test_a_profiler_of_the_caller_goes_on_and_the_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with torch.profiler.profile() as own:
        result = unisono.train(Tiny, output_dir=tmp_path / "run", profile="steps=1")
    assert result.step == 4 and result.profile is None
    assert "profiler cannot be started" in capsys.readouterr().err
    assert any(event.key.startswith("aten::") for event in own.key_averages())


def profile_on_rank_1_by_the_caller(folder: str) -> int:
    with torch.profiler.profile() if os.environ["RANK"] == "1" else nullcontext():
        result = unisono.train(Tiny, output_dir=folder, profile="steps=1", strategy="ddp")
    assert result.profile is None
    return int(result.step)


def test_if_the_profiler_cannot_be_started_on_one_rank_no_rank_waits_for_its_profile(tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path / "run")}
    assert run_ranks("profile_on_rank_1_by_the_caller", __file__, 2, arguments, timeout_s=60) == [4, 4]


def test_an_error_in_a_profiled_step_ends_the_profiler(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="injected"):
        unisono.train(
            Tiny, output_dir=tmp_path / "a", profile="steps=2,start=2", inject="error@rank0:step2", max_restarts=0
        )
    assert unisono.train(Tiny, output_dir=tmp_path / "b", profile="steps=2,start=2").profile is not None


def test_a_full_disk_costs_the_profile_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/profile").write_text("in the way")
    assert unisono.train(Tiny, output_dir=tmp_path / "run", profile="steps=1").step == 4
    assert "its folder cannot be created" in capsys.readouterr().err
    assert (tmp_path / "run/profile").read_text() == "in the way"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("5", "cannot read '5'"),
        ("steps=0", "expected steps=1 to steps=100, got steps=0"),
        ("steps=101", "got steps=101"),
        ("steps=-1", "cannot read 'steps=-1'"),
        ("steps=five", "cannot read 'steps=five'"),
        ("memory", "needs a number of steps, as in steps=5,memory"),
        ("steps=5,memory,memory", "memory occurs twice"),
        ("steps=5,start=0", "steps count from 1"),
        ("steps=5,stop=9", "cannot read 'stop=9'"),
        ("steps=5,", "cannot read ''"),
        ("", "cannot read ''"),
        ("steps=٥", "cannot read"),
        ("steps=" + "9" * 5000, "cannot read"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_field(
    wrong: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        parse_profile(wrong)
    assert str(error.value).startswith("profile: ") and message in str(error.value) and len(str(error.value)) < 400
    assert main(["train", TINY, "--output_dir", str(tmp_path / "run"), f"--profile={wrong}"]) == 2
    printed = capsys.readouterr().err.strip()
    assert "profile: " in printed and "\n" not in printed and not (tmp_path / "run").exists()


def test_the_parts_of_a_value_may_have_any_order() -> None:
    assert parse_profile(None) is None
    assert parse_profile("steps=5") == ProfileSpec(5)
    assert parse_profile("start=7, memory, steps=2") == ProfileSpec(2, memory=True, start=7)


# A trace of a GPU, with times in microseconds: one step from 0 to 100 whose kernels run until 120.
def gpu_event(name: str, category: str, begin: float, end: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": end - begin, "tid": 1, "args": args}


GPU_TRACE = {
    "traceEvents": [
        gpu_event("unisono::step 3", "user_annotation", 0, 100),
        gpu_event("unisono::data", "user_annotation", 0, 20),
        gpu_event("unisono::forward", "user_annotation", 20, 60),
        gpu_event("unisono::reduce", "user_annotation", 60, 80),
        gpu_event("aten::linear", "cpu_op", 22, 40),
        gpu_event("aten::addmm", "cpu_op", 24, 38),
        gpu_event("cudaLaunchKernel", "cuda_runtime", 25, 26, correlation=1),
        gpu_event("cudaLaunchKernel", "cuda_runtime", 50, 51, correlation=2),
        gpu_event("cudaGraphLaunch", "cuda_runtime", 52, 53, correlation=3),
        gpu_event("gemm", "kernel", 30, 50, correlation=1),
        gpu_event("ncclDevKernel_AllReduce", "kernel", 40, 70, correlation=2),
        gpu_event("Memcpy HtoD", "gpu_memcpy", 60, 75, correlation=2),
        gpu_event("replayed", "kernel", 90, 120, correlation=3),
    ]
}


def test_the_time_of_a_gpu_is_divided_among_work_and_what_it_waits_for() -> None:
    rank = rank_summary(read_trace(GPU_TRACE, "cuda"), 0, comm_ms=0.02)
    parts = {name: round(1e3 * value, 6) for name, value in rank["device_ms"].items()}
    assert parts == {
        "compute": 50.0,  # 30–50, 90–120
        "communication": 20.0,  # 50–70: before that it overlaps with the gemm
        "copies": 5.0,  # 70–75
        "wait for data": 20.0,  # 0–20
        "wait for other ranks": 5.0,  # 75–80
        "wait for the host": 20.0,  # 20–30, 80–90
    }
    assert rank["step_ms"] == pytest.approx(0.12)


def test_kernels_belong_to_the_operator_that_launched_them_and_replayed_ones_to_none() -> None:
    trace = read_trace(GPU_TRACE, "cuda")
    ranks = [rank_summary(trace, 0, None)]
    content = summary(trace, ranks, world=1, device="a GPU", unprofiled_step_ms=None, memory=None)
    device_ms = {row["name"]: row["self_device_ms"] for row in content["operators"]}
    assert device_ms == {"aten::addmm": 0.02, "aten::linear": 0.0}
    assert {row["name"]: row["kind"] for row in content["kernels"]} == {
        "ncclDevKernel_AllReduce": "communication",
        "replayed": "compute",
        "gemm": "compute",
        "Memcpy HtoD": "copies",
    }
    assert "32% of the device time was replayed from a CUDA graph" in content["notes"][0]
    assert "47% of the device time belongs to kernels that no operator launched" in content["notes"][1]
    assert "gemm" in as_text(content) and "wait for the host" in as_text(content)


def test_own_time_excludes_inner_operators() -> None:
    spans = [Span(0, 100, "outer", 1), Span(10, 40, "inner", 1), Span(20, 30, "inner", 1), Span(50, 60, "other", 1)]
    assert self_times([*spans, Span(0, 100, "outer", 2)]) == {"outer": (160, 2), "inner": (30, 2), "other": (10, 1)}


def test_sets_of_intervals_equal_a_count_of_points() -> None:
    draw = random.Random(1)
    for _ in range(200):
        first, second = ([(a := draw.randrange(30), a + draw.randrange(6)) for _ in range(5)] for _ in range(2))
        points = [{p for begin, end in each for p in range(begin, end)} for each in (first, second)]
        sets = union(first), union(second)
        assert length(sets[0]) == len(points[0])
        assert length(intersection(*sets)) == len(points[0] & points[1])
        assert length(difference(*sets)) == len(points[0] - points[1])


def test_the_report_shows_the_profile_and_survives_a_damaged_one(runs: dict[str, Outcome], tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(runs["ddp, profiled"].folder, folder)
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    name = folders(runs["ddp, profiled"])[0]
    assert "<h2>Profile</h2>" in page and f"profile/{name}" in page and "aten::" in page
    assert page.count("data:image/svg+xml;base64,") == 2
    text = (folder / "profile" / name / "summary.json").read_text()
    hostile = json.loads(text)
    hostile["operators"][0]["name"] = hostile["notes"] = ["<script>alert(1)</script>"]
    attacks = ["{", "[]", "null", '{"version": 1}', text.replace('"step_ms": ', '"step_ms": 1e999, "x": ')]
    attacks += [text.replace('"host_ms": {', '"host_ms": {"data": "<b>", '), "[" * 100_000, json.dumps(hostile)]
    attacks += [text.replace('"first_step": ', '"first_step": "9", "y": '), text.replace('"rank": 0', '"rank": {}')]
    for attack in attacks:
        (folder / "profile" / name / "summary.json").write_text(attack)
        assert main(["report", str(folder)]) == 0, attack[:80]
        assert "<script>alert" not in (folder / "report.html").read_text()
    (folder / "profile" / name / "summary.json").write_text(text)
    for attack in ("{", "[]", '{"points": []}', '{"points": [["<b>", 1]], "steps": [[1,2,3]], "peak_bytes": 1}'):
        (folder / "profile" / name / "memory_rank_0.json").write_text(attack)
        assert main(["report", str(folder)]) == 0, attack


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_pictures_are_drawn_in_a_browser(runs: dict[str, Outcome], tmp_path: Path) -> None:
    outcome = runs["ddp, profiled"]
    assert main(["report", str(outcome.folder), "--output", str(tmp_path / "report.html")]) == 0
    browser = Browser(tmp_path / "profile")
    try:
        browser("Page.navigate", url=(tmp_path / "report.html").as_uri())
        browser.wait("document.readyState === 'complete'")
        shown = browser.ask(
            "[...document.querySelectorAll('.picture img')].map(each => each.complete && each.naturalWidth)"
        )
        assert shown == [960, 960]
        assert [event for event in browser.events if event.get("method") == "Log.entryAdded"] == []
    finally:
        browser.close()
