"""`unisono report RUN RUN` lays the curves of runs over each other and lists the settings in which they differ."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from browser import Browser
from test_report import ATTACK, Page, made
from unisono.cli.main import main


def run(folder: Path, rate: float, **record: object) -> Path:
    metrics = [{"step": step, "loss": 1 / (rate * step), "samples_per_s": 50 * rate} for step in range(1, 21)]
    metrics += [{"step": 20, "eval/right": rate}]
    config = {"learning_rate": rate, "batch_size": 8, "output_dir": str(folder)}
    events = [{"kind": "start", "step": 0, "world": 2}, {"kind": "done", "step": 20}]
    return made(folder, metrics, events, **{"config": config, "global_batch": 16, **record})  # type: ignore[arg-type]


def test_runs_share_charts_and_differing_settings_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "slow", 0.5, versions={"torch": "2.9", "python": "3.11"})
    run(tmp_path / "fast", 2.0, versions={"torch": "2.10", "python": "3.11"}, global_batch=32)
    assert main(["report", "slow", "fast"]) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    page = Page((tmp_path / "comparison.html").read_text())
    said = " ".join(page.text.split())
    assert "setting slow fast effective batch 16 32 learning_rate 0.5 2.0" in said
    assert "batch_size" not in said and "output_dir" not in said and "torch 2.9 2.10" in said and "python" not in said
    assert re.search(r"slow done 20 \S+ s 0.1 0.5 25 0", said), said
    colours = {
        (line.get("data-colour"), name)
        for line in page.all("g")
        if line.get("data-values")
        for name in ("slow", "fast")
        if f'"name":"{name}"' in (line["data-values"] or "")
    }
    assert colours == {("c0", "slow"), ("c1", "fast")}, "a run has the same colour in every chart"
    titles = re.findall(r"<h3>(.*?)</h3>", (tmp_path / "comparison.html").read_text())
    assert {"Loss, training", "eval/right", "Throughput"} <= set(titles)
    first = (tmp_path / "comparison.html").read_text()
    assert main(["report", "fast", "slow"]) == 0 and (tmp_path / "comparison.html").read_text() != first


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    folders = [run(tmp_path / name / "run", 1.0) for name in ("a", "b")]
    output = tmp_path / "page.html"
    assert main(["report", *map(str, folders), "--output", str(output)]) == 0
    page = Page(output.read_text())
    assert "a/run" in page.text and "b/run" in page.text and "All settings are the same." in page.text


def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = run(tmp_path / "one", 1.0), run(tmp_path / "two", 2.0)
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    assert main(["report", str(one)]) == 0
    capsys.readouterr()
    cases = {
        (one, one): "is listed twice",
        (one, tmp_path / "none"): "is not a run folder",
        tuple(tmp_path / str(n) for n in range(9)): "at most 8 runs",
        (one, two, "--output", mine): "is not a unisono comparison",
        (one, two, "--output", one / "report.html"): "is not a unisono comparison",
    }
    for words, said in cases.items():
        assert main(["report", *map(str, words)]) == 2
        told = capsys.readouterr()
        assert told.out == "" and told.err.count("\n") == 1 and said in told.err
    assert mine.read_text() == "mine"


def test_a_comparison_escapes_text_and_works_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    folders = [
        run(tmp_path / f"{n}{ATTACK.replace('/', '_')}", n, recipe=ATTACK, config={ATTACK: f"{ATTACK}{n}"})
        for n in (1, 2)
    ]
    output = tmp_path / "page.html"
    assert main(["report", *map(str, folders), "--output", str(output)]) == 0
    browser.events.clear()
    browser("Page.navigate", url=output.as_uri())
    browser.wait("document.readyState === 'complete' && document.querySelectorAll('svg[data-plot]').length >= 2")
    assert browser.ask("document.querySelectorAll('img, [onload], [onerror]').length") == 0
    assert browser.ask("document.scripts.length") == 1
    box = browser.ask(
        "(b => [b.x + b.width / 2, b.y + b.height / 2])(document.querySelector('svg').getBoundingClientRect())"
    )
    browser("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    browser.wait("document.querySelector('.tip').textContent.split('\\n').length === 3")
    assert not [event for event in browser.events if event["method"] == "Runtime.exceptionThrown"]


def test_a_run_without_a_step_can_be_compared(tmp_path: Path) -> None:
    folders = [made(tmp_path / "empty"), run(tmp_path / "one", 1.0)]
    output = tmp_path / "page.html"
    assert main(["report", *map(str, folders), "--output", str(output)]) == 0
    assert "unfinished" in Page(output.read_text()).text
