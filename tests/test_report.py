"""`unisono report` shows a run from its folder alone, completely and in any state."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import signal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from command_line import TINY, unisono
from unisono.cli.main import main
from unisono.errors import UserError
from unisono.formatting import format_number
from unisono.observe.folder import RunFolder
from unisono.observe.report.page import status_of
from unisono.observe.report.read import read_run
from unisono.observe.report.series import LIMIT, Curves, Series
from unisono.observe.report.write import write_report
from unisono.pages.axis import linear, logarithmic
from unisono.pages.chart import Chart, Line, draw

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'><svg onload=alert(3)>"


class Page(HTMLParser):
    """The elements of a page, their attributes, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in = tag

    def handle_data(self, data: str) -> None:
        if self._in not in ("script", "style"):
            self.text += data + " "

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def lines(self) -> dict[str, dict[str, Any]]:
        """All drawn lines: name -> x and y of the last line with that name."""
        result = (json.loads(a["data-values"] or "") for a in self.all("g") if "data-values" in a)
        return {line["name"]: line for line in result}


def made(folder: Path, metrics: list[Any] = (), events: list[Any] = (), **record: Any) -> Path:  # type: ignore[assignment]
    """A run folder with these records."""
    run = RunFolder(folder)
    run.open({"id": "1", "recipe": "Made", **record})
    for event in events:
        run.event(**event)
    for line in metrics:
        run.metrics(line)
    run.close()
    return folder


def report(folder: Path) -> Page:
    return Page(write_report(folder).read_text())


@pytest.fixture(scope="module")
def survivor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of two ranks, with one kill and one NaN loss."""
    folder = tmp_path_factory.mktemp("report")
    faults = "kill@rank1:step7,nan@rank0:step9"
    words = ["--nproc", "2", "--max_steps", "12", "--save_every", "3", "--no_async_save", "--output_dir", "run"]
    done = unisono("train", TINY, *words, "--inject", faults, cwd=folder)
    assert done.code == 0, done.err
    return folder / "run"


def test_the_report_of_a_killed_run_shows_the_whole_history(survivor: Path) -> None:
    done = unisono("report", "run", cwd=survivor.parent)
    assert (done.code, done.out, done.err) == (0, "run/report.html\n", "")
    text = (survivor / "report.html").read_text()
    page = Page(text)
    page_text = " ".join(page.text.split())
    for part in (
        "Tiny",
        "trained to the end",
        "in 2 starts",
        "2, ddp",
        "killed by SIGKILL",
        "from step 6: 2 ranks, ddp",
    ):
        assert part in page_text, part
    assert "the step was skipped on all ranks" in page_text and "kill@rank1:step7" in page_text
    assert re.search(r"faults survived 2 1 restart", page_text)
    assert "checkpoints were saved" in page_text and "save_every 3 1000 flag" in page_text
    assert page_text.index("Changed from the defaults") < page_text.index("Settings of the recipe")
    assert page.lines()["training"]["x"] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12]  # the value at step 9 was not a number
    titles = {a["id"] for a in page.all("title") + page.all("desc") if "id" in a}
    charts = [a for a in page.all("svg") if a.get("role") == "img"]
    assert len(charts) >= 4
    assert all(set((a["aria-labelledby"] or "").split()) <= titles for a in charts)


def test_the_report_shows_a_kill_of_the_whole_run_and_its_restart(tmp_path: Path) -> None:
    words = ["--save_every", "3", "--no_async_save", "--learning_rate", "0.01", "--batch_size", "3"]
    killed = unisono(
        "train", TINY, *words, "--max_steps=9", "--output_dir=run", "--inject=kill@rank0:step9", cwd=tmp_path
    )
    assert killed.code == -signal.SIGKILL
    assert unisono("train", TINY, "--output_dir=run", cwd=tmp_path).code == 0
    page = " ".join(report(tmp_path / "run").text.split())
    assert re.search(r"faults survived 1 no restart, [1-3] steps? repeated", page), page[:2000]
    assert "learning_rate 0.01 0.001 flag" in page, "who set it is known after a resume"
    assert "effective batch 3 " in page, "of the whole run, though the second start says nothing about it"
    assert "max_steps 9 4 flag" in page, "the default is the recipe's, as in --help"
    assert "log_every 1 " not in page.split("At their defaults")[0], "a recipe's default is a default"


def test_a_page_needs_no_other_files(survivor: Path, tmp_path: Path) -> None:
    text = write_report(survivor, tmp_path / "page.html").read_text()
    assert not re.search(r"https?://|@import|url\(|//[a-z]+\.", re.sub(r"<script>.*</script>", "", text, flags=re.S))
    for tag, attributes in Page(text).elements:
        assert tag not in ("link", "iframe", "object", "base")
        assert (attributes.get("src") or "data:").startswith("data:")
        assert "href" not in attributes
    assert "default-src 'none'" in text and "prefers-color-scheme: dark" in text


def test_text_of_a_run_is_escaped_on_the_page(tmp_path: Path) -> None:
    bad = {ATTACK: ATTACK, "nested": [{ATTACK: ATTACK}]}
    start = dict.fromkeys(("time", "world", "strategy", "launcher", "why", "from_step"), ATTACK)
    folder = made(
        tmp_path / ATTACK.replace("/", "_"),
        [{"step": 1, "loss": 1.0, f"eval/{ATTACK}": 2.0, ATTACK: 1.0, f"eval/{ATTACK}_by_{ATTACK}": [1, 2]}],
        [{"kind": kind, "step": 1, "error": ATTACK, "what": ATTACK} for kind in ("failed", "worker_died", ATTACK)],
        **{"recipe": ATTACK, "launcher": ATTACK, "seed": ATTACK, "versions": bad, "config": bad, "sources": bad},
    )
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "created": ATTACK, "starts": [start, ATTACK, None]}))
    (folder / "previews").mkdir()
    (folder / "previews" / "step_00000001_<img src=x onerror=alert(4)>.txt").write_text(ATTACK)
    (folder / "previews" / "step_00000001_a.svg").write_text("<svg onload='alert(5)'/>")
    page = report(folder)
    assert len(page.all("script")) == 1
    assert all(not name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert all((a["src"] or "").startswith("data:image/svg+xml;base64,") for a in page.all("img"))
    assert page.text.count("alert(1)") >= 10  # it appears as text


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "{", "null", '"run"', "\x00" * 99, "[" * 100_000],
    ids=["empty", "list", "nothing", "half", "null", "text", "zeros", "deep"],
)
def test_a_folder_without_a_run_is_rejected_in_one_line(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and "run.json" in output.err
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_missing_folder_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not os.listdir(tmp_path)


def test_only_a_report_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "run", [{"step": 1, "loss": 1.0}])
    mine = tmp_path / "mine.html"
    mine.write_text("<!doctype html><title>mine</title>")
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "elsewhere.html")
    for taken in (mine, tmp_path, link, tmp_path / "no" / "folder.html", folder / "run.json"):
        before = taken.read_text() if taken.is_file() else ""
        assert main(["report", str(folder), "--output", str(taken)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert (taken.read_text() if taken.is_file() else "") == before
    assert not (tmp_path / "elsewhere.html").exists()
    first = write_report(folder).read_text()
    with open(folder / "metrics.jsonl", "a") as lines:
        lines.write('{"step": 2, "loss": 0.5}\n')
    assert write_report(folder).read_text() != first
    assert not [name for name in os.listdir(folder) if name.startswith(".report")]


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    folder = made(tmp_path, [{"step": 1, "loss": 1.0}], [{"kind": "start", "step": 0}])
    with open(folder / "metrics.jsonl", "ab") as lines:
        lines.write(b'\x00\x00\x00\n[1]\n{"loss": 3}\n\xff\xfe\n' + b"[" * 200_000 + b"\n")
        lines.write(b'{"step": true, "loss": 1}\n' + b'"' + b"x" * (5 * 2**20) + b'"\n')
        lines.write(b'{"step": 2, "loss": 0.5}\n{"step": 3, "lo')
    with open(folder / "events.jsonl", "ab") as lines:
        lines.write(b'{"kind": 3}\n{"kind": "do')
    page = report(folder)
    assert page.lines()["training"]["y"] == [1, 0.5]
    assert "8 lines of metrics.jsonl were skipped" in page.text and "2 lines of events.jsonl were skipped" in page.text


def test_numbers_that_cannot_be_drawn_leave_a_gap(tmp_path: Path) -> None:
    values = [1.0, math.nan, math.inf, 1e308, -1e308, 10**400, 2.0, True, None, "text", {}, []]
    folder = made(tmp_path, [{"step": step, "loss": value} for step, value in enumerate(values) if value != 10**400])
    with open(folder / "metrics.jsonl", "a") as lines:
        lines.write('{"step": 5, "loss": 1' + "0" * 400 + "}\n")
    page = report(folder)
    assert page.lines()["training"]["y"] == [1, 2]
    assert "Values that are not finite are not drawn (5 values)." in page.text


def test_a_million_values_become_few_points_and_no_peak_is_lost() -> None:
    series = Series()
    for x in range(1_000_000):
        series.add(x, 1.0 + (x % 7) / 100)
    before = series.points()
    assert (series.count, series.lowest, series.highest) == (1_000_000, 1.0, 1.06)
    series = Series((x, {0: 3.0, 123_457: 9.0, 654_321: -5.0, 999_999: 2.0}.get(x, 1.0)) for x in range(1_000_000))
    points = series.points()
    assert max(len(before), len(points)) <= LIMIT
    assert {(0, 3.0), (123_457, 9.0), (654_321, -5.0), (999_999, 2.0)} <= set(points)
    assert points == sorted(points)
    assert series.mean == pytest.approx(1.0, abs=1e-4)
    assert len(series.trend()) <= LIMIT


def test_few_values_stay_as_they_are() -> None:
    values = [(float(x), math.sin(x)) for x in range(900)]
    assert Series(values).points() == values


def test_a_metric_that_is_a_curve_is_drawn_over_its_index(tmp_path: Path) -> None:
    name = "eval/unseen_return_by_episode"
    folder = made(tmp_path, [{"step": 10 * k, name: [0.0, k, "nan", 2 * k]} for k in range(1, 41)])
    page = report(folder)
    assert page.lines()["step 400"] == {"name": "step 400", "x": [1, 2, 4], "y": [0, 40, 80]}
    old = [a for a in page.all("path") if "old" in (a.get("class") or "").split()]
    assert 5 <= len(old) <= 12
    assert "unseen_return_by_episode" in page.text


def test_older_curves_are_kept_evenly_and_in_bounded_number() -> None:
    curves = Curves(limit=8)
    for step in range(10_000):
        curves.add(step, [step, step])
    steps = [step for step, _ in curves.older()]
    assert len(steps) <= 8 and steps[0] == 0 and steps[-1] >= 6_000
    assert curves.newest is not None and curves.newest[0] == 9_999


def test_evaluation_and_training_share_a_chart(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1.0 / step, "correct": 0.5 * step} for step in (1, 2)]
    page = report(made(tmp_path, [*lines, {"step": 2, "eval/loss": 2.0, "eval/correct": 0.25}]))
    assert len(page.all("svg")) == 2
    assert page.lines()["evaluation"]["y"] == [0.25]


def test_baselines_of_a_metric_are_drawn_next_to_it(tmp_path: Path) -> None:
    figures = {"MRR@10_bm25": 0.5, "MRR@10_best_of_all": 0.9, "MRR@10": 0.75, "MRR@10_best": 0.8, "MRR": 0.1}
    figures |= {"rank_MRR": 0.2}
    lines = [{"step": step, **{f"eval/{name}": v * step for name, v in figures.items()}} for step in (1, 2)]
    page = report(made(tmp_path, lines))
    assert len(page.all("svg")) == 3  # MRR@10, MRR, rank_MRR
    drawn = page.lines()
    assert [drawn[name]["y"] for name in ("bm25", "best_of_all", "best")] == [[0.5, 1.0], [0.9, 1.8], [0.8, 1.6]]


def test_the_same_quantities_of_several_groups_share_a_chart_each(tmp_path: Path) -> None:
    names = [f"eval/{group}_{what}" for group in ("train", "unseen") for what in ("return", "solved")]
    names += ["eval/flow_loss", "eval/velocity_loss"]  # these may be two different quantities
    page = report(made(tmp_path, [{"step": step, **dict.fromkeys(names, 0.5 * step)} for step in (1, 2)]))
    titles = re.findall(r"<h3>(.*?)</h3>", (tmp_path / "report.html").read_text())
    assert titles == ["return", "solved", "flow_loss", "velocity_loss"]
    assert {"train", "unseen"} <= set(page.lines())


def test_single_and_constant_values_are_shown_in_a_table(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1.0 / step, "lr": 0.001, "mem_gib": 0.5} for step in (10, 20, 30)]
    page = report(made(tmp_path, [*lines, {"step": 30, "eval/mAP": 0.75, "eval/hit": 1.0}]))
    assert len(page.all("svg")) == 1, "the loss alone is a curve"
    page_text = " ".join(page.text.split())
    assert "eval/mAP 0.75 step 30 eval/hit 1 step 30" in page_text
    assert "lr 0.001 always, steps 10 to 30" in page_text and "mem_gib 0.5 always, steps 10 to 30" in page_text


def test_the_report_shows_what_training_changed_if_step_0_was_evaluated(tmp_path: Path) -> None:
    lines = [{"step": 0, "eval/mAP": 0.25}, {"step": 5, "eval/mAP": 0.5}, {"step": 9, "eval/mAP": 0.75}]
    page_text = " ".join(report(made(tmp_path / "one", lines)).text.split())
    assert "before training (step 0) last change eval/mAP 0.25 0.75 +0.5" in page_text
    assert "before training" not in report(made(tmp_path / "two", lines[1:])).text


def test_the_loss_at_the_top_equals_the_charts(tmp_path: Path) -> None:
    few = [{"step": step, "loss": 1 / step + step % 2} for step in range(1, 30)]
    many = [{"step": step, "loss": 1 / step + step % 2} for step in range(1, 200)]
    for name, lines, label in (("few", few, "loss"), ("many", many, "loss, smoothed")):
        page = report(made(tmp_path / name, lines))
        text = (tmp_path / name / "report.html").read_text()
        [tile] = re.findall(rf"<span>{label}</span> <b>(.*?)</b>", text)
        [legend] = re.findall(r"training <b>(.*?)</b>( smoothed)?</li>", text)
        assert legend == (tile, " smoothed" if name == "many" else "")
        assert page.lines()["training"]["y"][-1] == pytest.approx(lines[-1]["loss"], rel=1e-4)


def test_the_axis_of_a_fraction_ends_at_1() -> None:
    for values in ([1.0, 1.0], [0.3, 0.97], [0.0, 1.0], [0.999, 1.0]):
        axis = linear(min(values), max(values), 0, 100, least=0.0, most=1.0)
        assert 0 <= axis.low < axis.high == 1.0 and axis.ticks[-1][0] <= 1.0 + 1e-9, axis
    assert linear(1.0, 1.0, 0, 100).high == 1.1, "without a limit there is room on both sides"


def test_a_lone_value_lies_on_an_axis_from_the_beginning_of_the_run() -> None:
    assert 'data-plot="{&quot;left&quot;: 52, &quot;right&quot;: 546, &quot;x&quot;: [0.0, 120]' in draw(
        Chart("alone", [Line("evaluation", [(120, 0.5)])]), 0
    )


def test_events_are_bounded_and_repetitions_are_one_line(tmp_path: Path) -> None:
    nan = [{"kind": "nan", "step": step, "loss": "nan"} for step in range(1, 501)]
    many = [{"kind": f"odd{step % 200}", "step": step} for step in range(2_000)]
    folder = made(tmp_path, [], [{"kind": "start", "step": 0, "world": 1}, *nan, *many])
    run = read_run(folder)
    assert run.timeline.counts["nan"] == 500 and len(run.timeline.all()) <= 300
    page = report(folder)
    assert "500 times" in page.text and "steps 1–500" in page.text
    assert f"… {2_002 - 300:,} more …" in page.text


def test_saves_are_counted_not_listed(tmp_path: Path) -> None:
    saves = [{"kind": "save", "step": step, "seconds": 0.5, "bytes": 2_000_000} for step in range(100)]
    page = report(made(tmp_path, [], saves))
    assert "100 checkpoints were saved, 1.9 MiB each, in 0.5 s on average." in page.text
    assert not page.all("time")


def test_the_timeline_mentions_machines_and_missing_previews(tmp_path: Path) -> None:
    joined = {"kind": "machines", "joined": [1], "left": [], "machines": [0, 1]}
    missing = {"kind": "preview_left_out", "step": 3, "rank": 0, "error": "disk full"}
    text = " ".join(report(made(tmp_path, [], [joined, missing])).text.split())
    assert "machines joined [1], left []; machines [0, 1] continue from the last checkpoint" in text
    assert "no preview rank 0 training continued: disk full" in text


def test_a_kill_counts_as_a_fault_and_a_stop_by_the_user_does_not(tmp_path: Path) -> None:
    start, resume = {"kind": "start", "step": 0, "world": 1}, {"kind": "resume", "step": 40, "world": 1}
    save = {"kind": "save", "step": 40}
    killed = [start, save, {**resume, "repeated": 20}, {"kind": "done", "step": 90}]
    page_text = " ".join(report(made(tmp_path / "killed", [], killed)).text.split())
    assert "faults survived 1 no restart, 20 steps repeated" in page_text and "Nothing went wrong" not in page_text
    assert (
        "killed the run ended without an event" in page_text and "from step 40: 1 rank; 20 steps repeated" in page_text
    )

    signal = [{"kind": "signal", "step": 40, "signal": "SIGINT"}, {"kind": "stopped", "step": 40}]
    stopped = [start, save, *signal, resume, {"kind": "done", "step": 90}]
    page_text = " ".join(report(made(tmp_path / "stopped", [], stopped)).text.split())
    assert "faults survived 0 no restart" in page_text and "repeated" not in page_text
    assert "Nothing went wrong. A signal stopped the run 1 time, with a checkpoint." in page_text

    failed = [start, save, {"kind": "failed", "step": 50, "error": "x"}, {**resume, "repeated": 3}]
    timeline = read_run(made(tmp_path / "failed", [], failed)).timeline
    assert (timeline.survived, timeline.repeated) == (1, 3)
    restarted = [start, save, {"kind": "restart", "step": 50}, {**resume, "repeated": 7}]
    timeline = read_run(made(tmp_path / "restarted", [], restarted)).timeline
    assert (timeline.survived, timeline.repeated) == (1, 7)


@pytest.mark.parametrize(
    ("kinds", "status"),
    [
        (["start", "done"], "done"),
        (["start", "signal", "stopped"], "stopped"),
        (["start", "failed"], "failed"),
        (["start"], "unfinished"),
        (["start", "stopped", "resume", "done"], "done"),
        (["start", "stopped", "resume"], "unfinished"),
    ],
)
def test_the_status_is_the_last_event(kinds: list[str], status: str, tmp_path: Path) -> None:
    folder = made(tmp_path, [], [{"kind": kind, "step": 1} for kind in kinds])
    assert status_of(read_run(folder))[0] == status


def test_the_report_of_an_active_run_says_running(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.open({"id": "1", "recipe": "Made"})
    run.event("start", step=0, world=1)
    assert "running" in report(tmp_path).text
    run.close()
    assert "unfinished" in report(tmp_path).text


def test_previews_are_shown_newest_first_and_in_limited_number(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    previews = folder / "previews"
    previews.mkdir()
    for step in (1, 20, 300):
        (previews / f"step_{step:08d}_picture.png").write_bytes(PIXEL)
        (previews / f"step_{step:08d}_words.txt").write_text(f"<at {step}>")
    (previews / "step_00000001_huge.png").write_bytes(b"\0" * (5 * 2**20))
    (previews / "step_00000001_long.txt").write_text("x" * 10**6)
    (previews / "step_00000001_weights.bin").write_bytes(b"1")
    (tmp_path / "secret.txt").write_text("do not tell")
    (previews / "step_00000001_link.txt").symlink_to(tmp_path / "secret.txt")
    os.mkfifo(previews / "step_00000001_pipe.txt")
    text = write_report(folder).read_text()
    page = Page(text)
    assert [a["alt"] for a in page.all("img")] == [f"picture.png at step {step}" for step in (300, 20, 1)]
    assert page.all("img")[0]["src"] == f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}"
    assert page.text.index("<at 300>") < page.text.index("<at 20>") < page.text.index("<at 1>")
    assert "do not tell" not in text and len(text) < 200_000
    for name in ("huge.png: too large", "weights.bin: neither", "link.txt: not a readable", "pipe.txt: not a regular"):
        assert name in page.text, name


def test_a_caption_is_shown_below_its_sample(tmp_path: Path) -> None:
    previews = made(tmp_path) / "previews"
    previews.mkdir()
    for name in ("samples.png", "sample_00.png", "sample_01.png", "sample_07.png", "room.png"):
        (previews / f"step_00000001_{name}").write_bytes(PIXEL)
    (previews / "step_00000001_captions.txt").write_text("a red circle\na <blue> square\n")
    (previews / "step_00000001_room.txt").write_text("seen from above")
    report(tmp_path)
    text = (tmp_path / "report.html").read_text()
    figure = r'<figure class="card preview"><figcaption><h3>(.*?)</h3>.*?</figcaption>(.*?)</figure>'
    cards = dict(re.findall(figure, text, re.DOTALL))
    assert 'class="caption">a red circle</p>' in cards["sample_00.png"]
    assert 'class="caption">a &lt;blue&gt; square</p>' in cards["sample_01.png"]
    assert 'class="caption">seen from above</p>' in cards["room.png"]
    assert "caption" not in cards["sample_07.png"] and "caption" not in cards["samples.png"]
    names = list(cards)
    assert names.index("captions.txt") == names.index("samples.png") + 1 < names.index("sample_00.png")


def test_named_entries_are_drawn_as_bars(tmp_path: Path) -> None:
    lines = [{"step": 3, "eval/right_by_class": [0.25, 1.0], "eval/of_optimum_by_task": [0.5, 0.75]}]
    page = report(made(tmp_path, lines, labels={"right_by_class": ["cat", "<dog>"], "gone": ["x"], "odd": 3}))
    text = (tmp_path / "report.html").read_text()
    bars = re.findall(
        r'<th scope="row">(.*?)</th><td><meter min="0" max="1" value="(.*?)"></meter></td><td>(.*?)</td>', text
    )
    assert bars == [("cat", "0.25", "0.25"), ("&lt;dog&gt;", "1", "1")]
    assert len(page.all("svg")) == 1 and len(page.all("circle")) == 2
    assert not [a for a in page.all("path") if "line" in (a.get("class") or "")], "tasks have no order"


def test_a_run_without_a_single_step_still_has_a_page(tmp_path: Path) -> None:
    page = report(made(tmp_path))
    assert "Made" in page.text and not page.all("svg") and "Nothing went wrong." in page.text


def test_changed_settings_come_first_even_after_a_resume(tmp_path: Path) -> None:
    config = {"log_every": 10, "learning_rate": 0.5, "slope": 3.0}
    page = report(made(tmp_path, config=config, sources=dict.fromkeys(config, "run")))
    page_text = page.text
    assert page_text.index("learning_rate") < page_text.index("slope") < page_text.index("log_every")


def test_defaults_on_the_page_are_those_that_help_shows_for_the_recipe(tmp_path: Path) -> None:
    config = {"log_every": 50, "learning_rate": 0.5, "slope": 3.0, "bend": 1.0}
    sources = {"log_every": "recipe", "learning_rate": "flag", "slope": "file", "bend": "default"}
    defaults = {"log_every": 50, "learning_rate": 0.25, "slope": 2.0, "bend": 1.0}
    page = report(made(tmp_path, config=config, sources=sources, defaults=defaults))
    page_text = " ".join(page.text.split())
    assert "learning_rate 0.5 0.25 flag slope 3.0 2.0 file" in page_text
    assert "Settings of the recipe setting value bend 1.0" in page_text
    assert "At their defaults (1) setting value log_every 50" in page_text


def read_back(text: str) -> float:
    number, _, unit = text.replace(",", "").partition(" ")
    return float(number) * {"": 1.0, "M": 1e6, "G": 1e9, "T": 1e12}[unit]


@example(110.2, 3)
@example(1000.2, 4)
@example(999.96e6, 3)
@example(-20.04, 2)
@given(st.floats(-1e20, 1e20), st.integers(2, 6))
def test_numbers_on_the_page_are_correct_to_the_digits_shown(value: float, digits: int) -> None:
    text = format_number(value, digits)
    assert abs(read_back(text) - value) <= 0.5001 * 10.0 ** (1 - digits) * abs(value), text
    assert len(text) <= digits + 9


@pytest.mark.parametrize(
    "ends", [(0, 1), (-3.2, 88), (0.1234, 0.1235), (5, 5), (0, 0), (1e-12, 3e-12), (-1e299, 1e299)]
)
def test_an_axis_has_few_round_ticks_and_spans_the_values(ends: tuple[float, float]) -> None:
    axis = linear(*ends, 0, 100)
    assert 2 <= len(axis.ticks) <= 12 and len({label for _, label in axis.ticks}) == len(axis.ticks)
    assert all(-1e-6 <= axis.position(value) <= 100 + 1e-6 for value in ends)


@pytest.mark.parametrize("ends", [(0.0037, 0.53), (1e-9, 1e9), (0.02, 9.0), (1.0, 100.0), (1e-290, 1e290)])
def test_a_logarithmic_axis_spans_the_values(ends: tuple[float, float]) -> None:
    axis = logarithmic(*ends, 0, 100)
    assert 2 <= len(axis.ticks) <= 12
    assert all(-1e-6 <= axis.position(value) <= 100 + 1e-6 for value in ends)


def test_a_run_with_unreadable_files_is_a_user_error(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (folder / "run.json").unlink()
    (folder / "run.json").mkdir()
    with pytest.raises(UserError, match=r"run\.json"):
        read_run(folder)
