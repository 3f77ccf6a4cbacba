"""examples/seo: the imports, the usage examples and the check script run as written."""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from command_line import end, environment, lines, start
from scripts import importable
from unisono.engine.batch import plan_batch
from unisono.engine.start.run import configure
from unisono.recipes.seo import front
from unisono.recipes.seo.recipe import Seo
from unisono.settings import Settings

EXAMPLES = Path(__file__).resolve().parent.parent / "examples/seo"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    names = ("advanced_llm_seo_engine", "multi_gpu_training", "test_multi_gpu_training")
    with importable(EXAMPLES):
        yield {name: importlib.import_module(name) for name in names}


def test_the_original_module_name_exports_the_same_classes(scripts: dict[str, ModuleType]) -> None:
    module = scripts["advanced_llm_seo_engine"]
    assert sorted(module.__all__) == sorted(front.__all__)
    assert all(getattr(module, name) is getattr(front, name) for name in module.__all__)


def test_the_pages_have_both_labels_equally_often(scripts: dict[str, ModuleType]) -> None:
    texts, labels = scripts["multi_gpu_training"].read_pages()
    assert len(set(texts)) == len(texts) == 64 and sum(labels) == 32


def test_the_recipe_s_config_is_the_same_training_on_any_number_of_processes() -> None:
    resolved = configure(Seo, file=EXAMPLES / "score.yaml", overrides={"data_path": "pages.csv"})
    batch = resolved.build(Settings).batch
    plans = [plan_batch(batch, resolved.explicit, devices=devices) for devices in (1, 2, 4)]
    assert [plan.global_batch for plan in plans] == [8, 8, 8]


@pytest.mark.slow
def test_the_usage_examples_run_as_written_and_two_processes_train_like_one(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for room in ("multi_gpu.gpus", "recipes.seo.front.devices"):
        monkeypatch.setattr(f"unisono.{room}.visible_gpus", lambda: [])
    assert scripts["multi_gpu_training"].main([]) == 0
    one = capfd.readouterr()
    assert one.out.count("Strategy: single\nActive GPUs: 0\nDevice: cpu\n") == 2
    notes = re.findall(r"note: (\d) GPUs were requested.* stays (\d+)", one.err)
    assert notes == [("2", "32"), ("4", "64"), ("2", "8")]  # one for each engine
    accuracy, baseline = re.findall(r"accuracy ([\d.]+); baseline \(constant prediction\) ([\d.]+)", one.out)[0]
    assert float(accuracy) > float(baseline) + 0.2
    assert "effective batch 8 on 1 device(s)" in one.out and "learned score of a new page" in one.out
    (tmp_path / "two").mkdir()
    two = end(start([*TORCHRUN, EXAMPLES / "multi_gpu_training.py"], cwd=tmp_path / "two"))
    assert two.code == 0, two.err
    assert "effective batch 8 on 2 device(s)" in two.out
    losses = [re.findall(r"validation loss ([\d.]+)", output)[0] for output in (one.out, two.out)]
    assert abs(float(losses[0]) - float(losses[1])) < 2e-4


def test_a_missing_model_is_one_line(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("unisono.recipes.seo.front.devices.visible_gpus", lambda: [])
    assert scripts["multi_gpu_training"].main(["--model_name", "./nowhere"]) == 2
    assert "./nowhere: there is no such folder" in capsys.readouterr().err.splitlines()[-1]


def test_the_check_script_passes_on_one_process(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for room in ("multi_gpu.gpus", "recipes.seo.front.devices"):
        monkeypatch.setattr(f"unisono.{room}.visible_gpus", lambda: [])
    checks = scripts["test_multi_gpu_training"]
    monkeypatch.setattr(checks, "GPUS", 0)
    assert checks.main() == 0
    stdout = capsys.readouterr().out
    assert stdout.count(": PASS") == 8 and stdout.count(": SKIP") == 2


def test_the_check_script_reports_what_fails(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = scripts["test_multi_gpu_training"]
    monkeypatch.setattr(checks, "CHECKS", [checks.multi_gpu_configuration])
    monkeypatch.setattr(checks, "SEOConfig", lambda: front.SEOConfig(bucket_cap_mb=30))
    assert checks.main() == 1 and "multi_gpu_configuration: FAIL" in capsys.readouterr().out


@pytest.mark.slow
def test_the_check_script_passes_on_two_processes(tmp_path: Path) -> None:
    ended = end(start([*TORCHRUN, EXAMPLES / "test_multi_gpu_training.py"], cwd=tmp_path), 240)
    assert ended.code == 0, ended.err
    assert ended.out.count(": PASS") == 9 and not list(tmp_path.iterdir())


def test_train_py_trains_the_recipe_on_the_pages(tmp_path: Path) -> None:
    words = ["--max_steps", "2", "--num_workers", "0", "--output_dir", "run"]
    ended = end(start([EXAMPLES / "train.py", *words], cwd=tmp_path))
    assert ended.code == 0, ended.err
    assert [line["step"] for line in lines(tmp_path / "run")][-1] == 2
    result = end(start([EXAMPLES / "train.py", "--task", "score", "--print_config"], cwd=tmp_path))
    assert result.code == 0 and "pages.csv" in result.out and "model_name: tiny" in result.out, result.err
    other = end(
        start([EXAMPLES / "train.py", "--task", "rank", "--output_dir", "score", "--print_config"], cwd=tmp_path)
    )
    assert "pages.csv" not in other.out
    refused = end(start([EXAMPLES / "train.py", "--task", "writing"], cwd=tmp_path))
    assert refused.code == 2 and len(refused.err.splitlines()) == 1


def test_everything_that_the_readme_names_exists() -> None:
    text = (EXAMPLES / "README.md").read_text()
    named = set(re.findall(r"[\w-]+\.(?:py|csv|yaml|slurm)\b", text))
    assert named and all((EXAMPLES / name).is_file() for name in named)
    assert yaml.safe_load((EXAMPLES / "score.yaml").read_text())["task"] == "score"
    checked = subprocess.run(["bash", "-n", str(EXAMPLES / "train_seo.slurm")], env=environment(), check=False)
    assert checked.returncode == 0
