"""examples/clips: the commands of its README and of the original document run as written."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from command_line import Ended, end, lines, start, unisono
from scripts import importable
from test_clips_video import film, tone
from unisono.multi_gpu import MultiGPUConfig
from unisono.recipes.clips.recipe import Clips
from unisono.recipes.clips.remarks import LEAST_SPREAD
from unisono.recipes.clips.settings import MIRROR_PRESETS

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples/clips"
README = (EXAMPLES / "README.md").read_text()
SMALL = ["--num_videos", "4", "--num_epochs", "1"]


def block(kind: str, number: int) -> list[str]:
    """The lines of a code block in the README, without comments."""
    result = re.findall(rf"^```{kind}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[number]
    return [line for line in (each.split("  #")[0].rstrip() for each in result.splitlines()) if line]


def typed(line: str, cwd: Path, *more: str) -> Ended:
    """Runs a line of the README."""
    program, *words = shlex.split(line)
    assert program == "unisono"
    return unisono(*words, *more, cwd=cwd, OMP_NUM_THREADS="1")


def test_the_readme_trains_and_cuts_on_the_built_in_dataset(tmp_path: Path) -> None:
    train, cut = block("bash", 1)
    ended = typed(train, tmp_path, *SMALL)
    assert ended.code == 0, ended.err
    # The numbers in the README are for the full dataset.
    ended = typed(cut.replace("120x32", "4x32"), tmp_path, "--num_clips", "2", "--device", "cpu")
    assert ended.code == 0, ended.err
    made = {path.name for path in (tmp_path / "clips/eval_0000").iterdir()}
    assert {"clips.json", "page.html"} < made and len(made) == 4
    result = json.loads((tmp_path / "clips/eval_0000/clips.json").read_text())
    assert len(result["scores"]) == 30 and all(2 <= clip["end"] - clip["start"] <= 4 for clip in result["clips"])
    assert all(abs(clip["file_start"] - clip["start"]) < 0.3 for clip in result["clips"])  # not at a key frame before


def test_the_pages_state_how_long_the_built_in_dataset_takes() -> None:
    rows = json.loads((ROOT / "benchmarks/results/clips_learning.json").read_text())["rows"]
    seconds = [row["wall_s"] for name, row in rows.items() if re.fullmatch(r"seed \d, 1 rank", name)]
    for page in (README, (ROOT / "docs/clips.md").read_text()):
        assert f"{min(seconds):.0f} to {max(seconds):.0f} s on one rank" in " ".join(page.split())


def test_the_page_names_the_defaults_of_the_built_in_set_and_those_of_other_videos() -> None:
    page = " ".join((ROOT / "docs/clips.md").read_text().split())
    own, others = (
        page.split("has defaults of its own:")[1]
        .split(". `--print_config`")[0]
        .split("For your own videos the defaults are")
    )
    reported = dict(re.findall(r"`(\w+) (\S+)`", own))
    assert reported and {name: str(value) for name, value in MIRROR_PRESETS.items() if name in reported} == {
        name: str(float(value)) if name == "learning_rate" else value for name, value in reported.items()
    }
    usual = [str(Clips.defaults.get(name, "constant")) for name in reported]
    assert [
        str(float(each)) if "e" in each else each for each in re.findall(r"[\w.-]+", others) if each != "and"
    ] == usual


def test_the_page_says_when_nothing_stands_out() -> None:
    assert f"less than {LEAST_SPREAD:g} apart" in " ".join((ROOT / "docs/clips.md").read_text().split())


def test_the_noise_table_matches_its_results_and_no_row_has_failed() -> None:
    results = ROOT / "benchmarks/results/clips_harder"
    with importable(ROOT / "benchmarks"):
        benchmark = import_module("clips")
        table = benchmark.harder_table(json.loads(results.with_suffix(".json").read_text()))
    assert "\n".join(table) + "\n" == results.with_suffix(".md").read_text()
    reported = [row.split(" | ")[0] for row in table[-len(benchmark.HARDER) :]]
    assert reported == [f"| {noise:g}" for noise in benchmark.HARDER] and "FAILED" not in "".join(table)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a user's videos and the labels of the README."""
    place = tmp_path_factory.mktemp("own")
    videos = place / "my_videos"
    videos.mkdir()
    for name, seconds in (("talk", 70), ("match", 24)):
        film(videos / f"{name}.mp4", [60 + 40 * (frame // 8 % 3) for frame in range(4 * seconds)], sound=tone(seconds))
        (place / f"{name}.mp4").symlink_to(videos / f"{name}.mp4")
    (videos / "labels.csv").write_text("\n".join(block("csv", 0)) + "\n")
    return place


@pytest.mark.slow
def test_the_readme_trains_and_cuts_on_a_users_videos(own: Path) -> None:
    train, both, crop, report, _ = block("bash", 2)
    ended = typed(train, own, "--max_steps", "2", "--num_workers", "0", "--batch_size", "2", "--mixed_precision", "no")
    assert ended.code == 0, ended.err
    assert lines(own / "runs/mine")[-1]["step"] == 2
    ended = typed(both, own, "--longest", "6", "--num_clips", "2")
    assert ended.code == 0, ended.err
    assert sorted(path.name for path in (own / "clips").iterdir()) == ["match", "talk"]
    ended = typed(crop, own, "--longest", "6", "--num_clips", "1")
    assert ended.code == 0 and len(list((own / "shorts/talk").glob("*.mp4"))) == 1, ended.err
    assert typed(report, own).code == 0 and (own / "runs/mine/report.html").is_file()


@pytest.mark.slow
def test_two_processes_train_on_a_users_videos_like_one(own: Path) -> None:
    ended = typed(block("bash", 2)[-1], own, "--steps", "2", "--batch_size", "2", "--num_workers", "0")
    assert ended.code == 0 and "Same run" in ended.out, ended.out + ended.err


def test_the_labels_in_the_readme_are_a_valid_table() -> None:
    rows = list(csv.DictReader(block("csv", 0)))
    assert {row["video"] for row in rows} == {"talk.mp4", "match.mp4"} and list(rows[0]) == [
        *("video", "start", "end", "score")
    ]


@pytest.mark.parametrize("line", block("bash", 3))
def test_every_command_for_a_users_model_is_in_the_readme(line: str) -> None:
    """test_examples_multi_gpu.py runs the commands; this test checks that none is missing or misspelt."""
    program, *words = shlex.split(line)
    if program == "torchrun":
        assert words.pop(0) == "--nproc_per_node=2"
    script, *flags = words
    text = (EXAMPLES / script).read_text()
    assert all(f'"{flag}"' in text for flag in flags if flag.startswith("--"))


@pytest.mark.slow
def test_two_processes_of_torchrun_run_the_examples(tmp_path: Path) -> None:
    _, nproc, _, *numbers = shlex.split(next(line for line in block("bash", 3) if line.startswith("torchrun")))
    words = ["-m", "torch.distributed.run", "--standalone", nproc, EXAMPLES / "multi_gpu_training_examples.py"]
    ended = end(start([*words, *numbers], cwd=tmp_path, OMP_NUM_THREADS="1"))
    assert ended.code == 0 and "Exception" not in ended.err, ended.err
    assert re.findall(r"^\d", ended.out, re.MULTILINE) == numbers  # only the main process prints
    assert re.findall(r"^   0\.0000$", ended.out, re.MULTILINE) == ["   0.0000"]  # loaded as it was saved


def test_links_in_the_documents_are_valid() -> None:
    for page in (EXAMPLES / "README.md", EXAMPLES / "MULTI_GPU_TRAINING_GUIDE.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (EXAMPLES / target).exists(), f"{page.name}: {target}"


def test_the_document_names_every_field_of_the_config() -> None:
    page = (EXAMPLES.parent.parent / "docs/multi_gpu.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*?) \|", page, re.MULTILINE)
    named = {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    assert named | {"strategy"} == {field.name for field in fields(MultiGPUConfig)}
    settings = {names: defaults for names, defaults in rows}
    assert settings["`batch_size`, `global_batch_size`, `gradient_accumulation_steps`"] == "32, –, 1"


# --- the original document, which uses the names of `multi_gpu_training`


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.chdir(tmp_path)
    with importable(EXAMPLES):
        yield import_module("multi_gpu_training")


def squares(number: int) -> torch.utils.data.Dataset[object]:
    return import_module("quick_start_multi_gpu").MovingSquares(number)  # type: ignore[no-any-return]


def test_gpu_management(known: ModuleType) -> None:
    gpu_info = known.get_gpu_info()
    optimal_gpus = known.select_optimal_gpus(num_gpus=4, min_memory_gb=8.0)
    assert set(gpu_info) == {"count", "devices", "memory", "capabilities"}
    assert set(optimal_gpus) <= {device["id"] for device in gpu_info["devices"]}


def test_data_parallel_and_recovery_from_out_of_memory(known: ModuleType) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6 * 16 * 16, 4))
    optimizer, loss_fn = torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss()
    train_loader = DataLoader(squares(32), batch_size=16)
    config = known.MultiGPUConfig(strategy="dataparallel", num_gpus=4, batch_size=32, num_workers=2)
    trainer = known.DataParallelTrainer(
        model=model, config=config, train_loader=train_loader, optimizer=optimizer, loss_fn=loss_fn
    )
    epoch = 0
    try:
        train_metrics = trainer.train_epoch(epoch)
    except RuntimeError as e:
        if "out of memory" in str(e).lower():
            torch.cuda.empty_cache()
            config.batch_size = config.batch_size // 2
        raise
    trainer.close()
    assert 1 < train_metrics["train_loss"] < 3


def test_benchmark_and_the_custom_loop(known: ModuleType) -> None:
    model, dataset = nn.Sequential(nn.Flatten(), nn.Linear(6 * 16 * 16, 4)), squares(16)
    config = known.MultiGPUConfig(batch_size=8, num_workers=0)
    results = known.benchmark_multi_gpu_performance(model, dataset, config, steps=2, warmup_steps=1)
    assert results["training_time"] > 0 and results["samples_per_second"] > 0
    assert "count" in results["gpu_utilization"]["gpu_info"] and "memory_usage" in results["gpu_utilization"]

    manager = known.MultiGPUTrainingManager(config)
    trainer = manager.create_trainer(model, dataset, squares(8))
    num_epochs, best_loss = 2, float("inf")
    for epoch in range(num_epochs):
        trainer.train_epoch(epoch)
        val_metrics = trainer.validate(epoch)
        if val_metrics["val_loss"] < best_loss:
            best_loss = val_metrics["val_loss"]
            trainer.save_checkpoint(epoch, "best_model.pth")
    trainer.close()
    assert Path("best_model.pth").is_dir() and best_loss < 10


DISTRIBUTED = """
from multi_gpu_training import MultiGPUConfig, launch_distributed_training
from multi_gpu_training_examples import create_datasets, create_model

if __name__ == "__main__":
    config = MultiGPUConfig(
        strategy='distributed',
        world_size=2,
        backend='nccl',
        master_addr='localhost',
        master_port='12355'
    )

    launch_distributed_training(
        rank=0,
        world_size=2,
        model_fn=create_model,
        dataset_fn=create_datasets,
        config=config,
        epochs=1
    )
"""


@pytest.mark.slow
def test_distributed_training_from_a_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n{DISTRIBUTED}")
    ended = end(start(["script.py"], cwd=tmp_path))
    assert ended.code == 0, ended.err
    assert (tmp_path / "checkpoints/best_model.pth").is_dir()
    assert "processes         2" in ended.out + ended.err
