"""examples/clips: the quick start and the seven multi-GPU examples run as written."""

from __future__ import annotations

import importlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from command_line import end, start
from scripts import importable
from unisono.multi_gpu import MultiGPUConfig

EXAMPLES = Path(__file__).resolve().parent.parent / "examples/clips"


@pytest.fixture(scope="module")
def examples() -> Iterator[ModuleType]:
    with importable(EXAMPLES):
        yield importlib.import_module("multi_gpu_training_examples")


@pytest.fixture
def quick_start(examples: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.chdir(tmp_path)
    return sys.modules["quick_start_multi_gpu"]


def answer(monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(answers) + "\n"))


@pytest.mark.parametrize("number", ["1", "2", "3", "4", "5", "6", "7"])
def test_each_of_the_seven_examples_runs(
    examples: ModuleType,
    number: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert examples.main([number]) == 0
    stdout = capfd.readouterr().out
    value = float(re.findall(r"^   (\S+)$", stdout, re.MULTILINE)[-1])
    if number == "6":  # the best checkpoint, loaded again, has the same loss
        assert value < 1e-6
    else:
        assert 0 < value < 3
    losses = [float(each) for each in re.findall(r"(?:loss|->) (\d\.\d\d)", stdout)]
    assert number == "4" or (losses[0] > 0.9 and losses[-1] < 0.7 * losses[0])  # something was learned
    if number == "7":
        assert "out of memory 1 time(s)" in stdout
    assert not list(tmp_path.iterdir())


def test_the_code_blocks_of_the_guide_run_as_written(
    examples: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    guide = (EXAMPLES / "MULTI_GPU_TRAINING_GUIDE.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL):
        exec(compile(block, "guide", "exec"), names)
    assert "batch_size changed from 16 to 8" in capsys.readouterr().err
    assert names["train_metrics"]["train_loss"] < 1 and names["clear_memory_cache"]() == {}


def test_an_example_prints_the_same_loss_each_time(examples: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    output = []
    for _ in range(2):
        assert examples.main(["3"]) == 0
        output.append(capsys.readouterr().out)
    assert output[0] == output[1]


def test_an_unknown_example_is_reported(examples: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert examples.main(["8"]) == 2 and "no example 8" in capsys.readouterr().err


def test_only_motion_reveals_the_direction_of_the_square(quick_start: ModuleType) -> None:
    data = quick_start.MovingSquares(4096)
    clips, labels = zip(*(data[i] for i in range(200)), strict=True)
    assert len(set(labels)) == 4
    first, again = data[7], data[7]
    assert bool((first[0] == again[0]).all()) and first[1] == again[1]
    assert abs(float(clips[0].mean()) - 16 / 256) < 0.1  # the same brightness for every direction


def test_interactive_setup_writes_a_config_file_and_prints_a_command_that_trains(
    quick_start: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "0", "", "64", "0.01", "", "0", "2", "mine.yaml")
    assert quick_start.main(["--interactive"]) == 0
    config = MultiGPUConfig.from_file(tmp_path / "mine.yaml")
    assert (config.batch_size, config.learning_rate, config.num_gpus, config.strategy) == (64, 0.01, 0, "auto")
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[0] == "python" and command[2:] == ["--config", "mine.yaml", "--epochs", "2"]
    answer(monkeypatch, "0", "", "32", "", "", "", "", "mine.yaml", "no/folder.yaml", "other.yaml")
    assert quick_start.main(["--interactive"]) == 0
    stdout = capsys.readouterr().out
    assert "mine.yaml already exists" in stdout and "no/folder.yaml cannot be written" in stdout
    assert MultiGPUConfig.from_file(tmp_path / "other.yaml").batch_size == 32
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["batch_size"] == 64
    ended = end(start([EXAMPLES / command[1], *command[2:]], cwd=tmp_path))
    assert ended.code == 0, ended.err
    assert "epoch 1: train_loss" in ended.out and "unseen clips are classified correctly" in ended.out
    assert (tmp_path / "checkpoints/best_model.pth").is_dir()


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (("two", "0"), "two: answer with a whole number of at least 0"),
        (("0", "everything", "auto"), "everything: answer with auto, single, dataparallel, distributed or sharded"),
        (("0", "", "0", "16"), "0: answer with a whole number of at least 1"),
        (("0", "", "", "fast", "nan", "-1", "0.01"), "-1: answer with a number above 0"),
        (("0", "", "", "", "fp32", "bf16"), "fp32: answer with no, fp16 or bf16"),
    ],
)
def test_an_invalid_answer_is_asked_for_again(
    quick_start: ModuleType,
    answers: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer(monkeypatch, *answers, *[""] * 8)
    assert quick_start.main(["--interactive"]) == 0
    assert f"  {words}\n" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["multi_gpu.yaml"]


def test_answers_that_end_early_write_nothing(
    quick_start: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "0", "everything")
    assert quick_start.main(["--interactive"]) == 2
    assert "nothing was written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_benchmark_prints_a_table(quick_start: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert quick_start.main(["--benchmark"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["devices", "samples/s", "seconds", "memory", "MiB"]
    assert len(lines) == 2 and lines[1].startswith("one device"), "there is nothing to compare it with"


def test_the_benchmark_compares_several_devices_with_one(
    quick_start: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"num_devices": 1, "samples_per_second": 5.0, "training_time": 4.0, "memory": {0: {"max_allocated": 2**20}}}
    two = {**one, "num_devices": 2, "samples_per_second": 9.0, "strategy": "ddp", "speedup": 1.8, "efficiency": 0.9}
    monkeypatch.setattr(
        quick_start, "benchmark_multi_gpu_performance", lambda *given, **more: {**two, "single_device": one}
    )
    assert quick_start.main(["--benchmark"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines[1:]] == ["ddp", "one", "speed-up"] and lines[1][1:3] == ["2", "9.0"]
    assert lines[3] == ["speed-up", "1.80,", "efficiency", "90%"]


def test_check_reports_the_installation(quick_start: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    code = quick_start.main(["--check"])
    stdout = capfd.readouterr().out
    assert code in (0, 1) and "torch" in stdout and "GPU" in stdout.splitlines()[-1]


def test_a_missing_config_file_is_one_line(quick_start: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert quick_start.main(["--config", "none.yaml"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
def test_ten_epochs_learn_the_directions(tmp_path: Path) -> None:
    ended = end(start([EXAMPLES / "quick_start_multi_gpu.py", "--epochs", "10"], cwd=tmp_path), 240)
    output = re.search(r"(\d+)% of 128 unseen clips", ended.out)
    assert output is not None and int(output[1]) >= 95, ended.out + ended.err
