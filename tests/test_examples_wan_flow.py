"""examples/wan_flow: the original script's commands, flags and files, run as they are written."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from command_line import lines
from scripts import check_batch_script, check_shell_script, command, importable
from unisono.engine.start.run import configure
from unisono.recipes.wan_flow.recipe import WanFlow
from unisono.recipes.wan_flow.settings import TINY

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/wan_flow"
MODEL = "models/wan2.2_ti2v_5B_fp16.safetensors"
PYTHON = [sys.executable]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone"]
LAUNCH = [*PYTHON, "-m", "torch.distributed.launch"]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example folder, so that tests leave no files in the original."""
    place = tmp_path_factory.mktemp("examples") / "wan_flow"
    left = ("runs", "dataset", "models", "checkpoints", "__pycache__", ".pytest_cache")
    shutil.copytree(EXAMPLE, place, ignore=shutil.ignore_patterns(*left))
    return place


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """How the script translates a command line, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    with importable(EXAMPLE):
        yield import_module("script_flags")


def settings(script: ModuleType, *words: object) -> tuple[dict[str, Any], str]:
    """All settings that a command line resolves to, and the notes about it."""
    completed, remarks = script.completed([str(word) for word in words])
    return script.resolve(completed).values, "; ".join(remarks)


# --- flags: each does what its name says, or is rejected with the reason

ACT = [
    ("--dataset_path there", "dataset_path", "there"),
    ("--dataset-dir there", "dataset_path", "there"),
    ("--batch_size 3", "batch_size", 3),
    ("--num_epochs 50", "num_epochs", 50),
    ("--learning_rate 1e-4", "learning_rate", 1e-4),
    ("--num_workers 3", "num_workers", 3),
    ("--checkpoint_dir there", "output_dir", "there"),
    ("--local_rank 0 --batch_size 5", "batch_size", 5),
    ("--local-rank=1 --batch_size 5", "batch_size", 5),
    ("--ema_decay 0.5", "ema_decay", 0.5),
    ("--use_ema", "ema_decay", 0.9999),
    ("--grad_clip 0.5", "grad_clip", 0.5),
    ("--weight_decay 0.2", "weight_decay", 0.2),
    ("--gradient_checkpointing", "activation_checkpointing", True),
    ("--torch_compile", "compile", True),
    ("--no_torch_compile", "compile", False),
    ("--device cpu", "gpus", "0"),
    ("--device cuda", "gpus", "1"),
    ("--device=cuda:2", "gpus", "2,"),
    ("--use_8bit_adam", "optimizer", "adamw8bit"),
    ("--fp8_optimizations", "quantize", "fp8"),
    ("--model_dtype bf16 --fp8_optimizations", "quantize", "fp8"),
    ("--model_dtype fp32", "mixed_precision", "no"),
    ("--model_dtype fp16", "mixed_precision", "fp16"),
    ("--model_dtype=bf16", "mixed_precision", "bf16"),
    ("--gpus all", "gpus", "all"),
    ("--nproc 2", "gpus", "auto"),
    ("--batch_size 1", "gpus", "1"),
]


@pytest.mark.parametrize(("words", "name", "value"), ACT, ids=[words for words, _, _ in ACT])
def test_a_flag_of_the_original_script_takes_effect(script: ModuleType, words: str, name: str, value: object) -> None:
    values, notes = settings(script, "--model_path", "somewhere", *words.split())
    assert values[name] == value and values["model_path"] == "somewhere" and not notes


def test_a_flag_without_effect_is_accepted_with_a_note(script: ModuleType) -> None:
    _, notes = settings(script, "--model_path", "somewhere", "--vae_gradient_checkpointing")
    assert "--vae_gradient_checkpointing has no effect" in notes


def test_ckpt_path_is_the_model(script: ModuleType) -> None:
    assert settings(script, "--ckpt_path", "models/mine.safetensors")[0]["model_path"] == "models/mine.safetensors"


REFUSED = {
    "--device tpu": "expected cpu, cuda or cuda:N",
    "--model_dtype int8": "expected fp32, fp16, bf16",
    "--ckpt_path": "needs a value",
    "--use_ema --ema_decay 0": "use one",
    "--batchsize 2": "did you mean --batch_size?",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_mistake_is_refused_in_one_line_with_the_fix(
    words: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_flow_matching.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        import_module("train_flow_matching").main()
    assert ended.value.code == 2 and not os.listdir()
    out, err = capsys.readouterr()
    assert not out and re.fullmatch(f"train_flow_matching.py: .*{re.escape(REFUSED[words])}.*\n", err)


def test_a_mistake_ends_the_script_with_exit_code_2(example: Path) -> None:
    ended = command(*PYTHON, "train_flow_matching.py", "--batchsize", 2, cwd=example)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1) and not (example / "runs").exists()


# --- defaults


def test_without_a_model_a_tiny_one_trains_on_shapes_and_a_note_says_so(script: ModuleType) -> None:
    for words in ([], ["--dataset_path", "./dataset/"]):
        values, notes = settings(script, "--num_epochs", 50, *words)
        assert (values["model_config"], values["dataset_path"], values["model_path"]) == ("tiny", "shapes", None)
        assert MODEL in notes and "--model_config tiny" in notes and "built-in shapes" in notes
        assert (values["num_epochs"], values["max_steps"]) == (50, None), "what a user says wins"
        assert f"for 50 epochs (--num_epochs); {TINY['max_steps']} steps are enough to learn the shapes" in notes
    assert settings(script, "--num_epochs", 50, "--max_steps", 7)[0]["max_steps"] == 7
    for words, is_few in {
        ("--batch_size", 1, "--num_epochs", 50): True,
        ("--batch_size", 2): True,
        ("--nproc", 2, "--batch_size", 16): False,
        (): False,
        ("--batch_size", 2, "--max_steps", 7): True,
        ("--batch_size", 2, "--gradient_accumulation_steps", 2): False,
    }.items():
        values, notes = settings(script, *words)
        assert values["global_batch_size"] is None, "what the user says is done"
        assert ("the shapes need about 32 samples per step" in notes) == is_few, words
    assert settings(script, "--num_epochs", 50, "--model_config", "tiny")[0]["max_steps"] is None, "it was asked for"


def test_the_original_scripts_model_is_used_if_its_file_exists(script: ModuleType) -> None:
    Path("models").mkdir()
    Path(MODEL).touch()
    values, notes = settings(script)
    assert (values["model_path"], values["model_config"], values["dataset_path"]) == (MODEL, None, "./dataset")
    assert (values["num_epochs"], values["shift"]) == (100, 5)
    assert (values["caption_dropout"], values["guidance"]) == (0, 1), "there is no text encoder for empty captions"
    assert MODEL in notes and "normalised" in notes
    values, notes = settings(script, "--parts_path", "there", "--shift", 3, "--max_steps", 7)
    assert (values["caption_dropout"], values["guidance"], values["shift"]) == (0.1, 5.0, 3)
    assert (values["num_epochs"], values["max_steps"], "normalised" in notes) == (None, 7, False)
    assert settings(script, "--model_config", "tiny")[0]["model_path"] is None, "what is said wins"


def test_the_tiny_model_trains_on_the_users_images_if_there_are_any(script: ModuleType) -> None:
    Path("dataset").mkdir()
    values, notes = settings(script)
    assert (values["dataset_path"], values["height"], values["width"]) == ("dataset", 32, 32) and "32 × 32" in notes
    assert settings(script, "--max_pixels", 4096)[0]["height"] == 0
    assert settings(script, "--dataset_path", "shapes")[0]["dataset_path"] == "shapes"
    assert settings(script, "--dataset_path", "elsewhere")[0]["dataset_path"] == "elsewhere", "missing: the recipe says"


def test_a_config_file_takes_effect(script: ModuleType) -> None:
    values, _ = settings(script, "--config", EXAMPLE / "tiny.yaml")
    assert values["model_config"] == "tiny" and values["batch_size"] == TINY["batch_size"]
    Path("mine.yaml").write_text("model_path: mine\nnum_epochs: 3\n")
    values, notes = settings(script, "--config", "mine.yaml")
    assert (values["model_path"], values["num_epochs"], notes) == ("mine", 3, "")


def test_the_choices_in_tiny_yaml_are_settings(script: ModuleType) -> None:
    text = (EXAMPLE / "tiny.yaml").read_text()
    choices = re.sub(r"^# (?=\w+: )", "", text, flags=re.MULTILINE)
    assert len(yaml.safe_load(choices)) > len(yaml.safe_load(text))
    Path("choices.yaml").write_text(choices)
    assert settings(script, "--config", "choices.yaml")[0]["lora_rank"] == 8


# --- scripts


@pytest.mark.parametrize("script", ["train_multigpu.sh", "train_flow_matching.slurm"])
def test_a_script_is_valid_and_can_be_executed(script: str) -> None:
    check_shell_script(EXAMPLE / script)


@pytest.mark.parametrize(
    ("words", "gpus", "nproc"),
    [("2", "auto", 2), ("", "1", None), ("all", "1", None), ("--nproc 3", "auto", 3)],
)
def test_train_multigpu_passes_everything_on(words: str, gpus: str, nproc: int | None, example: Path) -> None:
    more = ["--batch_size", 2, "--preview_prompts", "a red circle|two  words", "--print_config"]
    ended = command("./train_multigpu.sh", *words.split(), *more, cwd=example)
    assert ended.code == 0, ended.err
    values = yaml.safe_load(ended.out)
    assert (values["gpus"], values["nproc"], values["batch_size"]) == (gpus, nproc, 2)
    assert values["preview_prompts"] == "a red circle|two  words"


def test_train_multigpu_uses_gpus_if_there_are_any(example: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"  # a fake program that reports four GPUs and its arguments
    python.write_text('#!/bin/bash\nif [ "$1" = -c ]; then echo 4; else shift; echo "$@"; fi\n')
    python.chmod(0o755)
    for words, expected in {"2 --lr 1": "--gpus 2 --lr 1", "--lr 1": "--gpus all --lr 1"}.items():
        assert command("./train_multigpu.sh", *words.split(), cwd=example, first=str(tmp_path)).out.strip() == expected


@pytest.mark.parametrize("word", ["two", "0", "-1x"])
def test_train_multigpu_refuses_an_invalid_number(word: str, example: Path) -> None:
    ended = command("./train_multigpu.sh", word, cwd=example)
    assert ended.code == 2 and len(ended.err.splitlines()) == 1 and word in ended.err


def test_the_slurm_script_starts_one_task_per_gpu_and_requeues_itself(example: Path, tmp_path: Path) -> None:
    check_batch_script(
        example / "train_flow_matching.slurm", "train_flow_matching.py", "--checkpoint_dir runs/slurm-7", tmp_path
    )


def test_importing_the_script_does_not_wait_for_torch(example: Path) -> None:
    names = "FlowMatchingTrainer, cleanup_distributed, is_main_process, parse_args, setup_distributed"
    code = f"import sys, train_flow_matching; print('torch' in sys.modules); from train_flow_matching import {names}"
    ended = command(*PYTHON, "-c", code, cwd=example)
    assert (ended.code, ended.out) == (0, "False\n"), ended.err


def test_help_lists_the_flags_of_the_original_script(example: Path) -> None:
    ended = command(*PYTHON, "train_flow_matching.py", "--help", cwd=example)
    assert ended.code == 0 and not ended.err
    for flag in ("checkpoint_dir", "gradient_checkpointing", "torch_compile", "ema_decay", "dataset_path", "ckpt_path"):
        assert f"--{flag}" in ended.out
    assert ended.out.startswith("Trains Wan 2.1 or 2.2") and ended.out.count("  --model_dtype bf16 ") == 1


def test_the_guide_has_every_section_of_the_original() -> None:
    guide = (EXAMPLE / "MULTI_GPU_TRAINING.md").read_text()
    named = ("Requirements", "Quick start", "Batch", "Memory", "Performance tips", "Checkpoints", "Monitoring")
    for heading in (*named, "Troubleshooting"):
        assert f"\n## {heading}\n" in guide, heading
    ours = configure(WanFlow).values.keys() | WanFlow.aliases.keys() | {f"no_{name}" for name in WanFlow.aliases}
    flags = set(re.findall(r"(?<![\w-])--(\w+)", guide.partition("## Performance tips")[2].partition("\n## ")[0]))
    assert flags and flags <= ours


def test_examples_multigpu_lists_the_commands_of_the_guide_and_runs_one(example: Path) -> None:
    listed = command(*PYTHON, "examples_multigpu.py", cwd=example)
    guide = (EXAMPLE / "README.md").read_text()
    for known_command in (
        "python train_flow_matching.py --batch_size 1 --num_epochs 100",
        "./train_multigpu.sh 2 --batch_size 2 --num_epochs 50",
        "torchrun --nproc_per_node=2 train_flow_matching.py --batch_size 2",
    ):
        assert known_command in listed.out and known_command in guide
    ran = command(*PYTHON, "examples_multigpu.py", "--run", 2, "--print_config", cwd=example)
    assert ran.code == 0 and yaml.safe_load(ran.out.partition("\n")[2])["nproc"] == 2
    assert command(*PYTHON, "examples_multigpu.py", "--run", 99, cwd=example).code == 2


# --- the commands, for real

QUICKLY = ["--num_shapes", 16, "--max_steps", 2, "--log_every", 1, "--eval_every", -1, "--preview_every", -1]
COMMANDS = {
    "torchrun": ([*TORCHRUN, "--nproc_per_node=2", "train_flow_matching.py", "--batch_size", 2], 2),
    "train_multigpu.sh 2": (["./train_multigpu.sh", 2, "--batch_size", 2, "--num_epochs", 50], 2),
    "python": ([*PYTHON, "train_flow_matching.py", "--batch_size", 2, "--num_epochs", 100], 1),
    "train_multigpu.sh": (["./train_multigpu.sh", "--batch_size", 2], 1),
    "launch": ([*LAUNCH, "--nproc_per_node=2", "train_flow_matching.py", "--batch_size", 2], 2),
}
QUICK = ("torchrun",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS]
)
def test_a_documented_command_trains(name: str, example: Path) -> None:
    words, processes = COMMANDS[name]
    folder = f"runs/{name.replace(' ', '-')}"
    ended = command(*words, *QUICKLY, "--checkpoint_dir", folder, cwd=example)
    assert ended.code == 0, ended.err
    output = ended.out + ended.err
    assert output.count("train_flow_matching.py: no --model_path") == 1, "the main process says it"
    assert f"Number of processes: {processes}" in output
    record = json.loads((example / folder / "run.json").read_text())
    assert (record["starts"][0]["world"], record["config"]["dataset_path"]) == (processes, "shapes")
    steps = [line for line in lines(example / folder) if "loss" in line]
    assert [(line["step"], line["samples"]) for line in steps] == [(1, 2 * processes), (2, 4 * processes)]
    assert list((example / folder / "checkpoints").glob("step_*/manifest.json"))


@pytest.mark.slow
def test_the_original_model_trains_on_precomputed_latents_and_embeddings(example: Path, tmp_path: Path) -> None:
    from diffusers import WanTransformer3DModel

    shape = {"num_attention_heads": 1, "attention_head_dim": 128, "in_channels": 48, "out_channels": 48}
    model = WanTransformer3DModel(**shape, text_dim=32, ffn_dim=32, num_layers=1)
    place = tmp_path / "here"
    shutil.copytree(example, place, ignore=shutil.ignore_patterns("runs"))
    (place / "models").mkdir()
    (place / "dataset").mkdir()
    weights = {f"model.diffusion_model.{name}": weight for name, weight in model.half().state_dict().items()}
    save_file(weights, place / MODEL)
    for name in ("one", "two"):
        save_file({"latent": torch.randn(48, 1, 4, 4)}, place / f"dataset/{name}.latent.safetensors")
        save_file({"embeddings": torch.randn(1, 7, 32)}, place / f"dataset/{name}.safetensors")
    words = ["--num_epochs", 1, "--no_torch_compile", "--num_workers", 0, "--checkpoint_dir", "run"]
    ended = command(*PYTHON, "train_flow_matching.py", *words, cwd=place)
    assert ended.code == 0, ended.err
    assert MODEL in ended.err and json.loads((place / "run/run.json").read_text())["config"]["model_path"] == MODEL


@pytest.mark.slow
def test_validate_multigpu_trains_on_one_and_two_ranks_and_compares(example: Path) -> None:
    ended = command(*PYTHON, "validate_multigpu.py", "--strategies", "ddp", "--steps", 2, cwd=example, seconds=240)
    assert ended.code == 0, ended.err
    assert ended.out.count(" same ") == 3 and "Same run" in ended.out


def test_validate_multigpu_refuses_a_users_mistake(example: Path) -> None:
    ended = command(*PYTHON, "validate_multigpu.py", "--device", "tpu", cwd=example)
    assert ended.code == 2 and len(ended.err.splitlines()) == 1


@pytest.mark.slow
def test_the_tests_of_the_folder_pass(example: Path) -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_multigpu.py"]
    ended = command(*PYTHON, *words, cwd=example, seconds=240)
    assert ended.code == 0 and "skipped" not in ended.out, ended.out[-3000:]
