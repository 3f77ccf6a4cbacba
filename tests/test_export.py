"""`unisono export` writes the trained weights and overwrites nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from command_line import environment, unisono
from unisono import Recipe
from unisono.checkpoint.load import load_whole
from unisono.engine.export import export_run
from unisono.errors import UserError

RECIPE = """
import torch
from torch import nn
from unisono import Loss, Recipe

class Tied(Recipe):
    defaults = {"batch_size": 2, "num_workers": 0, "max_steps": 6, "save_every": 2, "ema_decay": 0.5}

    def model(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        model[2].weight = model[0].weight
        return model

    def dataset(self, split):
        return [torch.arange(3.0) + i for i in range(8)]

    def loss(self, model, batch, noise):
        return Loss(model(batch).square().sum(), len(batch))

    def evaluate(self, model, batch, noise):
        return {"size": (model[0].weight.square().sum(), 1)}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    (folder / "tied.py").write_text(RECIPE)
    flags = ["--output_dir", "run", "--eval_every", "2", "--best_metric", "eval/size", "--best_mode", "max"]
    done = unisono("train", "tied.py:Tied", *flags, cwd=folder)
    assert done.code == 0, done.err
    return folder / "run"


def exported(run: Path, folder: Path, *words: str) -> dict[str, torch.Tensor]:
    done = unisono("export", str(run), str(folder), *words, cwd=folder.parent)
    assert done.code == 0, done.err
    return load_file(folder / "model.safetensors")


def test_exported_files_have_the_usual_permissions(run: Path, tmp_path: Path) -> None:
    exported(run, tmp_path / "a")
    (tmp_path / "usual").touch()
    assert (tmp_path / "a/model.safetensors").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_the_average_is_exported_unless_the_weights_are_requested(run: Path, tmp_path: Path) -> None:
    average = exported(run, tmp_path / "a")
    weights = exported(run, tmp_path / "b", "--weights", "model")
    assert not torch.equal(average["0.weight"], weights["0.weight"])
    assert torch.equal(average["1.running_mean"], weights["1.running_mean"])  # buffers are not averaged
    assert {"0.bias", "1.weight", "2.bias"} <= average.keys()
    assert ("0.weight" in average) and ("2.weight" not in average)  # tied weights are stored once


@pytest.mark.slow
def test_a_step_and_the_best_can_be_exported(run: Path, tmp_path: Path) -> None:
    best = json.loads((run / "checkpoints" / "best.json").read_text())["step"]
    by_name = exported(run, tmp_path / "best", "--step", "best")
    by_number = exported(run, tmp_path / "number", "--step", str(best))
    assert all(torch.equal(by_name[name], by_number[name]) for name in by_name)
    other = next(step for step in (4, 6) if step != best)
    assert not torch.equal(exported(run, tmp_path / "other", "--step", str(other))["0.bias"], by_name["0.bias"])


def test_an_export_overwrites_nothing(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    done = unisono("export", str(run), "mine", cwd=tmp_path)
    assert done.code == 2 and "not an empty folder" in done.err
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "no run.json"),
        (["RUN", "--step", "99"], "step_00000099"),
        (["RUN", "--step", "last"], "expected a number"),
    ],
)
def test_a_failed_export_is_explained_in_one_line(run: Path, tmp_path: Path, words: list[str], said: str) -> None:
    arguments = [str(run) if word == "RUN" else word for word in words]
    done = unisono("export", arguments[0], "out", *arguments[1:], cwd=tmp_path)
    assert done.code == 2 and said in done.err and len(done.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", ["{run}/evil.py:Tied", "foreign.evil:Tied", "link.evil:Tied"])
def test_a_run_cannot_bring_its_own_code(run: Path, tmp_path: Path, words: str) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (tmp_path / "link").symlink_to(foreign)
    (foreign / "evil.py").write_text("open('executed', 'w')\n")
    record = json.loads((run / "run.json").read_text()) | {"recipe_from": words.format(run=foreign)}
    (foreign / "run.json").write_text(json.dumps(record))
    done = unisono("export", str(foreign), "out", cwd=tmp_path)
    assert done.code == 2 and "inside the run folder" in done.err
    assert not (tmp_path / "executed").exists()


def test_a_run_in_float64_is_exported_in_float64(tmp_path: Path) -> None:
    (tmp_path / "tied.py").write_text(RECIPE)
    flags = ["--output_dir", "run", "--max_steps", "2", "--dtype", "float64", "--tensorboard", "false"]
    assert unisono("train", "tied.py:Tied", *flags, cwd=tmp_path).code == 0
    weights = exported(tmp_path / "run", tmp_path / "out", "--weights", "model")
    saved = load_whole(tmp_path / "run" / "checkpoints" / "step_00000002", "model.")
    assert weights["0.weight"].dtype == torch.float64 and torch.equal(weights["0.weight"], saved["0.weight"])
    assert weights["1.running_mean"].dtype == torch.float64


def test_an_export_during_pruning_takes_the_newest_checkpoint(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    code = """
import sys
from pathlib import Path
import torch
from unisono.checkpoint.load import load_whole
from unisono.checkpoint.find import read_extra
from unisono.checkpoint.manifest import read_manifest
from unisono.checkpoint.save import Saver
folder = Path(sys.argv[1])
newest = folder / "step_00000006"
state, extra = load_whole(newest, ""), read_extra(newest)
identity = read_manifest(newest).identity
saver = Saver(folder, rank=0, world=1, group=None, keep_last=1, asynchronous=False, identity=identity)
for step in range(7, 10**9):
    saver.save(step, state, extra)
    if step == 8:
        print("pruning", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(copy / "checkpoints")], env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "pruning\n"
        for number in range(40):
            what = export_run(copy, tmp_path / f"out{number}")
            assert "weights of step_" in what and (tmp_path / f"out{number}" / "model.safetensors").is_file()
    finally:
        process.kill()
        process.communicate()


def test_a_failed_export_leaves_nothing_behind(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def export(self: Recipe, model: nn.Module, folder: Path) -> None:
        (folder / "part").mkdir()
        (folder / "part" / "one").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Recipe, "export", export)
    (tmp_path / "mine").mkdir()
    for folder in (tmp_path / "new", tmp_path / "mine"):
        with pytest.raises(UserError, match="cannot be written"):
            export_run(run, folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


def test_an_export_into_a_full_stdout_is_an_export(run: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "unisono", "export", str(run), "out"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, env=environment())
    assert done.returncode == 0 and "stdout cannot be written" in done.stderr and len(done.stderr.splitlines()) == 1
    assert (tmp_path / "out" / "model.safetensors").is_file()
