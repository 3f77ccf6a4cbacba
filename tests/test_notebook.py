"""`unisono.train` in a real Jupyter kernel, and the result of a run in Python: its table and its plot."""

from __future__ import annotations

import builtins
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import TINY
from notebook_kernel import Cell, Kernel
from unisono.engine.length import Result
from unisono.errors import UserError
from unisono.observe.folder import RunFolder
from unisono.observe.report.metrics_table import MetricsTable

pytest.importorskip("ipykernel")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel that several tests share, as the cells of a notebook do."""
    with Kernel(tmp_path_factory.mktemp("notebook")) as kernel:
        kernel.run("import json, os, sys, unisono")
        yield kernel


def test_several_ranks_start_by_themselves_and_one_live_bar_shows_them(kernel: Kernel) -> None:
    kernel.run("hold = 'hold'; open(hold, 'w').write('0.05'); os.environ['TINY_HOLD'] = os.path.abspath(hold)")
    cell = kernel.run(f"result = unisono.train({TINY!r}, nproc=2, max_steps=60, save_every=0, output_dir='two')")
    assert not cell.error, cell.text
    assert len(cell.displays) == 1, "one display is updated"
    first, last = cell.shown[0], cell.shown[-1]
    assert "starting" in first["text/plain"]
    assert last["text/plain"].startswith("done  step 60/60  loss ")
    running = [each["text/plain"] for each in cell.shown if each["text/plain"].startswith("running")]
    assert running and any("left" in text for text in running), [each["text/plain"] for each in cell.shown]
    live = next(each["text/html"] for each in cell.shown if each["text/plain"].startswith("running"))
    assert "<progress" in live and "unisono-run" in live
    assert any(each["text/html"].count("<tr>") == 3 for each in cell.shown), "a row per rank"
    assert "effective batch" in cell.text and "step 7/60" not in cell.text, "the bar replaces the line per logged step"
    script = "json.dumps([result.status, len(result.metrics), result.metrics[-1]['world'], result.last['loss']])"
    status, rows, world, loss = kernel.run(script).value()
    assert (status, rows, world) == ("done", 60, 2) and loss > 0


def test_a_class_of_the_notebook_trains_on_one_device_and_says_how_to_use_several(kernel: Kernel) -> None:
    kernel.run(
        "os.environ.pop('TINY_HOLD', None)\n"
        f"sys.path.insert(0, {str(Path(TINY).parent)!r})\n"
        "from tiny_recipe import Tiny\n"
        "class Mine(Tiny):\n"
        "    pass\n"
    )
    cell = kernel.run("result = unisono.train(Mine, nproc=2, output_dir='mine')")
    assert not cell.error, cell.text
    said = " ".join(cell.text.split())
    assert "Mine is defined in a notebook, which other processes cannot import: training on one device" in said
    assert "%%writefile my_recipe.py" in said and 'unisono.train("my_recipe.py:Mine")' in said
    assert cell.shown[-1]["text/plain"].startswith("done  step 4/4")
    assert kernel.run("json.dumps([result.metrics[0]['world'], 'UNISONO_SHOWN_ELSEWHERE' in os.environ])").value() == [
        1,
        False,
    ]


@pytest.mark.slow
def test_the_stop_button_saves_and_the_same_cell_continues(kernel: Kernel) -> None:
    kernel.run("open('hold', 'w').write('0.1'); os.environ['TINY_HOLD'] = os.path.abspath('hold')")
    pressed = []

    def press(cell: Cell) -> None:
        if not pressed and cell.shown and "loss" in cell.shown[-1]["text/plain"]:
            pressed.append(True)
            kernel.interrupt()

    call = f"result = unisono.train({TINY!r}, nproc=2, max_steps=300, output_dir='stopped')"
    cell = kernel.run(call, during=press)
    assert not cell.error and pressed, cell.text
    status, step = kernel.run("json.dumps([result.status, result.step])").value()
    assert status == "stopped" and 0 < step < 300
    assert "stopped: with a checkpoint" in cell.shown[-1]["text/plain"]
    kernel.run("os.environ.pop('TINY_HOLD')")
    again = kernel.run(call.replace("300", str(step + 2)))
    assert "resumed" in again.text and kernel.run("json.dumps([result.status, result.step])").value() == [
        "done",
        step + 2,
    ]


def test_a_notebook_shows_the_table_and_the_plot(kernel: Kernel) -> None:
    kernel.run(f"os.environ.pop('TINY_HOLD', None); result = unisono.train({TINY!r}, output_dir='table')")
    table = kernel.run("result.metrics").result
    assert "<table>" in table["text/html"] and re.search(r"\d+ steps, \d+ columns", table["text/html"])
    assert table["text/plain"].startswith("<metrics of ")
    picture = kernel.run("result.plot('loss', 'lr')").result
    assert len(picture["image/png"]) > 2000
    frame = kernel.run("frame = result.metrics.to_pandas(); json.dumps([list(frame.shape), frame.columns[0]])").value()
    rows, columns = kernel.run("json.dumps([len(result.metrics), len(result.metrics.columns)])").value()
    assert frame == [[rows, columns], "step"]
    failed = kernel.run("result.plot('no such metric')")
    assert "'no such metric' is not a metric of this run; it has step" in failed.error


def test_outside_of_a_notebook_nothing_is_displayed() -> None:
    from unisono.observe.watch.notebook import in_notebook

    assert not in_notebook()


def finished(folder: Path, metrics: list[dict[str, Any]]) -> Result:
    run = RunFolder(folder)
    run.open({"id": "1", "recipe": "Made"})
    for line in metrics:
        run.metrics(line)
    run.close()
    return Result(folder, "done", 3, {"loss": 0.5})


def test_a_step_is_one_row_and_missing_values_are_none(tmp_path: Path) -> None:
    lines = [
        {"step": 0, "eval/right": 0.1},
        {"step": 1, "loss": 4.0, "step_ms_by_rank": [1.0, 2.0]},
        {"step": 2, "loss": math.nan},
        {"step": 2, "eval/right": 0.9, "eval/curve": [0.1, math.inf]},
        {"step": 3, "loss": 1.0},
    ]
    result = finished(tmp_path, lines)
    with open(tmp_path / "metrics.jsonl", "a") as damaged:
        damaged.write('[1]\n{"loss": 3}\n{"step": 4, "lo')
    table = result.metrics
    assert len(table) == 4 and table["step"] == [0, 1, 2, 3]
    assert table.columns == ["step", "eval/right", "loss", "step_ms_by_rank", "eval/curve"]
    assert table["eval/right"] == [0.1, None, 0.9, None] and table[-1] == {"step": 3, "loss": 1.0}
    assert math.isnan(table["loss"][2]) and table[2]["eval/curve"] == [0.1, math.inf]
    assert table.points("eval/right") == ([0, 2], [0.1, 0.9])
    assert [row["step"] for row in table] == [0, 1, 2, 3] and table.rows[1]["step_ms_by_rank"] == [1.0, 2.0]
    with pytest.raises(KeyError, match="'los' is not a metric"):
        table["los"]
    frame = pytest.importorskip("pandas") and table.to_pandas()
    assert list(frame.columns) == table.columns and frame["loss"].isna().tolist() == [True, False, True, False]


def test_the_table_of_a_run_without_steps_is_empty(tmp_path: Path) -> None:
    table = MetricsTable.read(tmp_path / "none")
    assert len(table) == 0 and table.columns == [] and "0 steps" in repr(table)
    with pytest.raises(UserError, match="logged no numbers"):
        finished(tmp_path, []).plot()


def test_names_of_metrics_are_escaped_in_a_notebook(tmp_path: Path) -> None:
    table = finished(tmp_path, [{"step": 1, "<script>": 1.0, "loss": "<b>"}]).metrics
    html = table._repr_html_()
    assert "<script>" not in html and "<b>" not in html and "&lt;script&gt;" in html


def test_a_plot_has_a_chart_per_metric_with_its_evaluation(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    metrics = [{"step": step, "loss": 1000.0 / 10**step, "lr": 0.1} for step in (1, 2, 3)]
    result = finished(tmp_path, [*metrics, {"step": 3, "eval/loss": 2.0, "eval/right": 0.5}])
    figure = result.plot()
    assert [axes.get_title() for axes in figure.axes] == ["loss", "right"]
    loss = figure.axes[0]
    assert [line.get_label() for line in loss.lines] == ["training", "evaluation"] and loss.get_yscale() == "log"
    assert list(loss.lines[0].get_ydata()) == [100.0, 10.0, 1.0]
    assert [axes.get_title() for axes in result.plot("lr").axes] == ["lr"]
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 2000


def test_without_pandas_or_matplotlib_the_pip_line_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *arguments: Any, **more: Any) -> Any:
        if name.split(".")[0] in ("pandas", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *arguments, **more)

    result = finished(tmp_path, [{"step": 1, "loss": 1.0}])
    result.metrics.columns  # noqa: B018
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UserError, match="pip install pandas"):
        result.metrics.to_pandas()
    with pytest.raises(UserError, match="pip install matplotlib"):
        result.plot()


def test_a_result_of_launched_ranks_is_plain_json(tmp_path: Path) -> None:
    from dataclasses import asdict

    result = finished(tmp_path, [{"step": 1, "loss": 1.0}])
    assert len(result.metrics) == 1
    assert json.loads(json.dumps({**asdict(result), "folder": "x"})) == {
        "folder": "x",
        "status": "done",
        "step": 3,
        "last": {"loss": 0.5},
    }
