"""examples/wan_distill: the original script's commands, flags and files, run as they are written."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from command_line import end, lines
from scripts import begun, check_batch_script, check_shell_script, command, importable
from unisono.devices import Gpu
from unisono.recipes.wan_distill.settings import TINY

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/wan_distill"
PYTHON = [sys.executable]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run"]
SCRIPT = "train_distillation.py"
KNOWN_KEYS = (
    *("model_type", "hidden_size", "depth", "num_heads", "num_channels", "image_size", "patch_size"),
    *("text_max_length", "text_encoder_output_dim", "projection_factor"),
)
SMALL_STUDENT = dict(zip(KNOWN_KEYS, ("WanLiteStudent", 12, 1, 1, 16, 32, 16, 24, 32, 1.0), strict=True))


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example folder, so that tests leave no files in the original."""
    place = tmp_path_factory.mktemp("examples") / "wan_distill"
    shutil.copytree(EXAMPLE, place, ignore=shutil.ignore_patterns("outputs", "runs", "__pycache__", ".pytest_cache"))
    return place


@pytest.fixture(scope="module")
def small(example: Path) -> list[object]:
    """The four flags of the document, with a small random teacher and a student that fits it."""
    from diffusers import WanPipeline

    import wan_models

    WanPipeline(**wan_models.parts()._asdict(), transformer=wan_models.model()).save_pretrained(example / "teacher")
    (example / "config/small.json").write_text(json.dumps(SMALL_STUDENT))
    paths = ["--teacher_path", "teacher", "--student_config", "config/small.json"]
    return [*paths, "--data_path", "data/static_prompts.txt"]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """How the script translates a command line, in an empty folder on a machine without GPUs."""
    monkeypatch.chdir(tmp_path)
    with importable(EXAMPLE):
        module = import_module("script_flags")
        monkeypatch.setattr(module, "visible_gpus", list)
        yield module


def with_gpus(script: ModuleType, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    gpus = [Gpu(index, f"GPU-{index}aaa-0000", "H100", 80 * 10**9, 80 * 10**9, 0) for index in range(number)]
    monkeypatch.setattr(script, "visible_gpus", lambda: gpus)


def launched(monkeypatch: pytest.MonkeyPatch, world: int, local_world: int) -> None:
    variables = {"RANK": 0, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local_world, "MASTER_PORT": 1}
    for name, value in {**variables, "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, str(value))


def settings(script: ModuleType, *words: object) -> tuple[dict[str, Any], list[str]]:
    """All settings that a command line resolves to, and the notes about it."""
    completed, remarks = script.completed([str(word) for word in words])
    return script.resolve(completed).values, remarks


# --- flags: each does what its name says, or a note explains what it does instead

REAL = ["--teacher_path", "somewhere", "--student_config", "mine.json", "--data_path", "mine.txt"]
ACT = [
    ("--output_dir there", "output_dir", "there"),
    ("--batch_size 4", "batch_size", 4),
    ("--num_workers 3", "num_workers", 3),
    ("--num_epochs 7", "num_epochs", 7),
    ("--num_steps 7", "max_steps", 7),
    ("--lr 1e-5", "learning_rate", 1e-5),
    ("--gradient_checkpointing", "activation_checkpointing", True),
    ("--teacher_dtype float16", "teacher_dtype", "float16"),
    ("--teacher_device_strategy cpu", "teacher_device_strategy", "cpu"),
    ("--teacher_device_strategy gpu0", "teacher_device_strategy", "gpu0"),
    ("--teacher_device_strategy balanced", "teacher_device_strategy", "auto"),
    ("--teacher_device_strategy balanced --online", "teacher_device_strategy", "balanced"),
    ("--teacher_on_cpu", "teacher_device_strategy", "cpu"),
    ("--mixed_precision", "mixed_precision", "bf16"),
    ("--mixed_precision --batch_size 3", "mixed_precision", "bf16"),
    ("--mixed-precision=no", "mixed_precision", "no"),
    ("--mixed_precision fp16", "mixed_precision", "fp16"),
    ("--local_rank 0 --batch_size 5", "batch_size", 5),
    ("--local-rank=1 --batch_size 5", "batch_size", 5),
    ("--distributed", "gpus", "1"),
    ("--gpus all", "gpus", "all"),
    ("--sample_prompts one two", "sample_prompts", "one|two"),
    ("--sample_prompts one --batch_size 5", "batch_size", 5),
    ("--guidance_scale 4", "guidance", 4),
]


@pytest.mark.parametrize(("words", "name", "value"), ACT, ids=[words for words, _, _ in ACT])
def test_a_flag_of_the_original_script_takes_effect(script: ModuleType, words: str, name: str, value: object) -> None:
    values, _ = settings(script, *REAL, *words.split())
    assert values[name] == value
    assert [values[name] for name in ("teacher_path", "student_config", "data_path")] == REAL[1::2]


NOTES = {
    "--num_steps 7": "optimizer steps of the whole run",
    "--num_epochs 7": "an epoch is a pass over everything that the teacher generated",
    "--distributed": "torchrun --nproc_per_node=4",
    "--multi_gpu": "--multi_gpu has no effect: this machine has no GPU",
    "--teacher_on_cpu": "old name of --teacher_device_strategy cpu",
    "--teacher_device_strategy cpu": "without a GPU the teacher runs on the CPU",
    "--teacher_device_strategy gpu0": "without a GPU the teacher runs on the CPU",
    "--teacher_device_strategy balanced": "balanced needs --online",
    "--mixed_precision": "computes in bf16",
    "--sample_dir there": "--sample_dir there is not used: samples are in ./outputs/previews",
}


@pytest.mark.parametrize("words", NOTES)
def test_a_flag_with_another_meaning_is_explained_once(script: ModuleType, words: str) -> None:
    _, remarks = settings(script, *REAL, *words.split())
    assert sum(NOTES[words] in remark for remark in remarks) == 1
    _, otherwise = settings(script, *REAL, "--num_steps", 7) if words != "--num_steps 7" else settings(script, *REAL)
    assert not any(NOTES[words] in remark for remark in otherwise if words != "--num_epochs 7")


def test_the_note_on_the_teachers_placement_fits_the_machine(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(place: str, *more: object) -> str:
        (note,) = [it for it in settings(script, *REAL, "--teacher_device_strategy", place, *more)[1] if place in it]
        return note

    assert "GPU the teacher" in said("cpu") and "on the GPU" not in said("cpu")
    with_gpus(script, monkeypatch, 1)
    assert "each block computed on the GPU" in said("cpu")
    assert "each GPU has its own copy of the teacher" in said("gpu0")
    assert "on the GPU" not in said("cpu", "--gpus", 0)


def test_explicit_unisono_flags_need_no_note(script: ModuleType) -> None:
    words = ["--max_steps", 7, "--learning_rate", 1e-5, "--mixed_precision=no", "--gpus", 1]
    _, remarks = settings(script, *REAL, *words)
    assert [remark for remark in remarks if "mixed_precision" not in remark] == []


def test_notes_name_the_defaults_that_apply(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    values, remarks = settings(script, *REAL)
    assert (values["output_dir"], values["num_epochs"], values["max_steps"]) == ("./outputs", 10, None)
    assert (values["batch_size"], values["gpus"], values["learning_rate"]) == (2, "1", 1e-4)
    assert any("10 epochs" in remark for remark in remarks)
    assert "defaults: --lr 0.0001, --mixed_precision bf16 (original script: 1e-5, no)" in remarks
    with_gpus(script, monkeypatch, 1)
    assert any(
        "--teacher_dtype bfloat16 (original script: 1e-5, no, float32)" in it for it in settings(script, *REAL)[1]
    )


def test_multi_gpu_is_data_parallel_on_all_gpus(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(script, monkeypatch, 4)
    values, remarks = settings(script, *REAL, "--multi_gpu")
    assert (values["strategy"], values["gpus"]) == ("dp", "all")
    assert any(remark.startswith("Model wrapped with DataParallel on 4 GPUs") for remark in remarks)
    values, remarks = settings(script, *REAL, "--multi_gpu", "--gpus", "0,2")
    assert (values["strategy"], values["gpus"]) == ("dp", "0,2") and any("on 2 GPUs" in it for it in remarks)
    with_gpus(script, monkeypatch, 1)
    values, remarks = settings(script, *REAL, "--multi_gpu")
    assert (values["strategy"], values["gpus"]) == ("auto", "1") and any("has one GPU" in it for it in remarks)


def test_under_a_launcher_multi_gpu_and_distributed_are_not_needed(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, 4, 4)
    values, remarks = settings(script, *REAL, "--multi_gpu", "--distributed")
    assert values["strategy"] == "auto"
    assert sum("is not needed" in remark for remark in remarks) == 2
    assert "[Rank 0] Distributed training initialized: 4 processes by torchrun" in remarks


def test_more_processes_than_gpus_are_refused(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 8, 4)
    settings(script, *REAL)  # on the CPU, any number of processes is fine
    with_gpus(script, monkeypatch, 2)
    with pytest.raises(script.ConfigError, match=r"started 4 processes, .* has 2 GPUs.*--nproc_per_node=2"):
        settings(script, *REAL)
    with_gpus(script, monkeypatch, 4)
    settings(script, *REAL)


def test_a_sample_interval_in_epochs_becomes_a_preview_interval_in_steps(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine.txt").write_text("".join(f"prompt {number}\n" for number in range(50)))
    words = [*REAL, "--rollouts", 3, "--pairs", 4, "--batch_size", 4, "--num_eval", 0]  # 600 samples
    values, remarks = settings(script, *words, "--save_samples")
    assert values["preview_every"] == 150 and any("every 150 steps" in remark for remark in remarks)
    assert settings(script, *words, "--sample_interval", 2)[0]["preview_every"] == 300
    assert settings(script, *words[:-2], "--save_samples", "--num_eval", 10)[0]["preview_every"] == 120
    assert settings(script, *words, "--save_samples", "--global_batch_size", 12)[0]["preview_every"] == 50
    assert settings(script, *words, "--save_samples", "--preview_every", 7)[0]["preview_every"] == 7
    path = ["--trajectory_weight", 1, "--trajectory_points", 6]
    assert settings(script, *words, "--save_samples", *path)[0]["preview_every"] == 225
    assert settings(script, *words, "--save_samples", "--online")[0]["preview_every"] == 38
    assert settings(script, *words)[0]["preview_every"] == 500, "the recipe's own"
    with_gpus(script, monkeypatch, 5)
    assert settings(script, *words, "--save_samples", "--multi_gpu")[0]["preview_every"] == 30
    launched(monkeypatch, 3, 3)
    assert settings(script, *words, "--save_samples")[0]["preview_every"] == 50


def test_the_tiny_teacher_gets_a_student_and_prompts_that_fit_it(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLE)
    ours = ["--student_config", "config/student_config.json", "--data_path", "data/static_prompts.txt"]
    values, remarks = settings(script, "--teacher_path", "tiny", *ours)
    assert (values["student_config"], values["data_path"]) == ("config/tiny_student.json", "shapes")
    assert values["max_steps"] == TINY["max_steps"] and values["learning_rate"] == TINY["learning_rate"]
    assert sum("tiny" in remark for remark in remarks) == 2
    values, remarks = settings(script, "--teacher_path", "real", *ours)
    assert values["student_config"] == "config/student_config.json" and not any("tiny" in it for it in remarks)
    values, _ = settings(script, "--teacher_path", "tiny", "--student_config", "mine.json", "--data_path", "mine.txt")
    assert (values["student_config"], values["data_path"]) == ("mine.json", "mine.txt"), "what is the user's stays"


REFUSED = {
    "": "no teacher: pass --teacher_path",
    "--teacher_path t": "no prompts: pass --data_path",
    "--teacher_path t --data_path nowhere.txt --save_samples": "no such file",
    "--teacher_path teacher --sample_prompts": "--sample_prompts needs",
    "--sample_prompts a|b c": "'a|b' cannot be one of several prompts",
    "--teacher_path t --data_path t --sample_interval 0": "expected a number of epochs",
    "--teacher_path t --data_path t --sample_interval 2 --preview_every 5": "use one",
    "--teacher_on_cpu --teacher_device_strategy gpu0": "contradict each other",
    "--multi_gpu --strategy fsdp": "use one",
    "--multi_gpu=yes": "takes no value",
    "python train_distillation.py --batch_size 2": "torchrun starts python by itself",
    "--batchsize 2": "did you mean --batch_size?",
    "--teacher_dtype int4": "expected",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_mistake_is_refused_in_one_line_with_the_fix(
    words: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_distillation.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        import_module("train_distillation").main()
    assert ended.value.code == 2 and not os.listdir()
    out, err = capsys.readouterr()
    assert not out and re.fullmatch(f"train_distillation.py: .*{re.escape(REFUSED[words])}.*\n", err)


def test_a_mistake_ends_the_script_with_exit_code_2(example: Path) -> None:
    ended = command(*PYTHON, SCRIPT, "--batchsize", 2, cwd=example)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1) and not (example / "outputs").exists()


def test_torchrun_python_is_explained(example: Path) -> None:
    words = ["--standalone", "--nproc_per_node=2", "python", SCRIPT, "--distributed"]
    ended = command(*TORCHRUN, *words, cwd=example)
    assert ended.code and ended.err.count("leave that word out: torchrun --nproc_per_node=2 train_distillation.py") == 1
    assert not os.access(EXAMPLE / "python", os.X_OK), "no shell takes it for python"


# --- files


@pytest.mark.parametrize("script", ["run_distillation.sh", "train_distillation.slurm"])
def test_a_script_is_valid_and_can_be_executed(script: str) -> None:
    check_shell_script(EXAMPLE / script)


@pytest.mark.parametrize(
    ("word", "gpus", "devices"), [("", 0, ""), ("3", 0, "--nproc 3"), ("all", 0, ""), ("all", 4, "--gpus all")]
)
def test_run_distillation_trains_and_generates_an_image(
    word: str, gpus: int, devices: str, example: Path, tmp_path: Path
) -> None:
    python = tmp_path / "python"  # a fake torchrun that reports the number of GPUs and its arguments
    python.write_text(f'#!/bin/bash\nif [ "$1" = -c ]; then echo {gpus}; else echo "$@"; fi\n')
    python.chmod(0o755)
    variables = {"TEACHER_PATH": "some/where", "OUTPUT_DIR": "there", "PROMPT": "a b"}
    ended = command("./run_distillation.sh", *word.split(), "--lr", 1, cwd=example, first=str(tmp_path), **variables)
    trained, drew = ended.out.splitlines()
    assert trained.startswith(f"{SCRIPT} --teacher_path some/where --student_config config/student_config.json ")
    assert trained.endswith(" ".join(["--output_dir there", *devices.split(), "--lr 1"]))
    assert drew.startswith("run_inference.py --model_path there --prompt a b --output there/picture-")
    ended = command("./run_distillation.sh", cwd=example, first=str(tmp_path))
    assert "--teacher_path tiny --student_config config/tiny_student.json --data_path shapes" in ended.out
    assert command("./run_distillation.sh", "two", cwd=example, first=str(tmp_path)).code == 2


def test_the_slurm_script_starts_one_task_per_gpu_and_requeues_itself(example: Path, tmp_path: Path) -> None:
    check_batch_script(
        example / "train_distillation.slurm", "train_distillation.py", "--output_dir outputs/slurm-7", tmp_path
    )


@pytest.mark.parametrize(
    ("name", "teacher", "space"),
    [("student_config", "1.3b", 8), ("student_config_small", "1.3b", 8), ("tiny_student", "tiny", 4)],
)
def test_a_shipped_configuration_has_the_ten_keys_and_fits_its_teacher(name: str, teacher: str, space: int) -> None:
    from unisono.recipes.wan.models.load import transformer_config
    from unisono.recipes.wan_distill.models.student import num_weights, student_of

    file = EXAMPLE / f"config/{name}.json"
    values = json.loads(file.read_text())
    assert sorted(values) == sorted(KNOWN_KEYS)
    theirs = transformer_config(None, teacher)
    student = student_of(str(file), theirs, space)
    assert student.pixels == values["image_size"] and num_weights(student.config) < num_weights(theirs)
    assert student.config["attention_head_dim"] == theirs["attention_head_dim"], "heads can be taken whole"


def test_there_are_55_different_prompts() -> None:
    lines = (EXAMPLE / "data/static_prompts.txt").read_text().splitlines()
    assert len(lines) == len(set(lines)) == 55 and all(line == line.strip() != "" for line in lines)


def test_importing_the_script_does_not_wait_for_torch(example: Path) -> None:
    names = "cleanup_distributed, is_main_process, setup_distributed"
    code = f"import sys; from train_distillation import {names}; print('torch' in sys.modules)"
    ended = command(*PYTHON, "-c", code, cwd=example)
    assert (ended.code, ended.out) == (0, "False\n"), ended.err


def test_help_lists_the_flags_of_the_original_script(example: Path) -> None:
    ended = command(*PYTHON, SCRIPT, "--help", cwd=example)
    assert ended.code == 0 and not ended.err
    assert ended.out.startswith("usage: python train_distillation.py ")
    listed = (EXAMPLE / "README.md").read_text().partition("## Flags")[2].partition(", and all settings")[0]
    flags = re.findall(r"--\w+", listed)
    assert len(flags) == 21
    assert [flag for flag in flags if not re.search(rf"{flag}\b", ended.out.replace("[no_]", ""))] == []
    assert "--multi_gpu\n      All GPUs" in ended.out


def test_the_default_number_of_workers_is_that_of_the_original_script(script: ModuleType) -> None:
    for words, number in {(): 0, ("--num_workers", 4): 4, ("--num_workers=0",): 0}.items():
        assert settings(script, *REAL, *words)[0]["num_workers"] == number


def test_print_config_shows_the_settings(example: Path) -> None:
    ended = command(*PYTHON, SCRIPT, *REAL, "--num_steps", 7, "--print_config", cwd=example)
    assert ended.code == 0 and yaml.safe_load(ended.out)["max_steps"] == 7
    assert "run_inference.py" not in ended.err and not (example / "outputs").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--model_path nowhere --prompt a", "neither a run folder"),
        ("--model_path . --prompt a --output python", "already exists"),
    ],
)
def test_run_inference_refuses_with_one_line(words: str, expected: str, example: Path) -> None:
    ended = command(*PYTHON, "run_inference.py", *words.split(), cwd=example)
    assert ended.code == 2 and len(ended.err.splitlines()) == 1 and expected in ended.err


# --- the commands, for real

QUICKLY = ["--rollouts", 1, "--teacher_steps", 2, "--pairs", 1, "--rollout_batch", 55, "--num_workers", 0]
QUICKLY += ["--num_steps", 2, "--log_every", 1, "--no_torch_compile"]


def trained(example: Path, folder: str, processes: int, batch: int) -> dict[str, Any]:
    """Facts about a run of two steps."""
    record: dict[str, Any] = json.loads((example / folder / "run.json").read_text())
    assert [each["world"] for each in record["starts"]] == [processes]
    steps = [line for line in lines(example / folder) if "loss" in line]
    assert [(line["step"], line["samples"]) for line in steps] == [(1, batch), (2, 2 * batch)]
    assert list((example / folder / "checkpoints").glob("step_*/manifest.json"))
    return record


def test_the_documented_command_trains_and_its_student_generates(example: Path, small: list[object]) -> None:
    words = [*small, "--output_dir", "./outputs/wan_t2i", "--batch_size", 4, "--multi_gpu", "--save_samples"]
    words += ["--sample_prompts", "a red ball", "a ball", "--teacher_device_strategy", "balanced"]
    ended = command(*PYTHON, SCRIPT, *words, *QUICKLY, cwd=example)
    assert ended.code == 0, ended.err
    assert ended.err.count("--multi_gpu has no effect") == 1 and "--model_path ./outputs/wan_t2i" in ended.err
    config = trained(example, "outputs/wan_t2i", 1, 4)["config"]
    assert (config["preview_every"], config["teacher_device_strategy"]) == (14, "auto")
    previews = example / "outputs/wan_t2i/previews"
    assert (previews / "step_00000002_prompts.txt").read_text() == "a red ball\na ball\n"
    assert list(previews.glob("*.png"))
    from PIL import Image

    words = ["--model_path", "./outputs/wan_t2i", "--prompt", "a red ball", "--output", "drawn/ball.png"]
    ended = command(*PYTHON, "run_inference.py", *words, cwd=example)
    assert ended.code == 0, ended.err
    assert Image.open(example / "drawn/ball.png").size == (32, 32), "the size that it was trained with"
    assert "2 steps" in ended.out and (example / "outputs/wan_t2i/exported/step_00000002/model_index.json").is_file()


@pytest.mark.slow
def test_two_machines_train_one_run(example: Path, small: list[object]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [SCRIPT, "--distributed", *small, "--output_dir", "outputs/two", "--batch_size", 2, *QUICKLY]
    meet = ["--nproc_per_node=1", "--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
    both = [begun(*TORCHRUN, *meet, f"--node_rank={rank}", *words, cwd=example) for rank in (0, 1)]
    main, other = (end(each, 240) for each in both)
    assert main.code == other.code == 0, main.err + other.err
    trained(example, "outputs/two", 2, 4)
    assert main.err.count("[Rank 0] Distributed training initialized: 2 processes by torchrun") == 1
    assert main.err.count("--distributed is not needed") == 1
    assert "train_distillation.py:" not in other.err, "the main process says it"


COMMANDS = {
    "alone": ([*PYTHON, SCRIPT], 1),
    "torchrun": ([*TORCHRUN, "--standalone", "--nproc_per_node=2", SCRIPT, "--distributed"], 2),
    "unisono's own": ([*PYTHON, SCRIPT, "--nproc", 2, "--gradient_checkpointing", "--mixed_precision"], 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_documented_command_trains(name: str, example: Path, small: list[object]) -> None:
    words, processes = COMMANDS[name]
    folder = f"outputs/{name.split()[0]}"
    ended = command(*words, *small, *QUICKLY, "--output_dir", folder, "--batch_size", 4, cwd=example)
    assert ended.code == 0, ended.err
    trained(example, folder, processes, 4 * processes)
    assert ended.err.count("--num_steps counts optimizer steps") == 1


@pytest.mark.slow
def test_with_nothing_downloaded_run_distillation_makes_a_teacher_and_a_student(example: Path, tmp_path: Path) -> None:
    cache = {"UNISONO_CACHE": str(tmp_path), "UNISONO_TINY_TEACHER_STEPS": "2", "OUTPUT_DIR": "outputs/tiny"}
    words = ["./run_distillation.sh", "2", "--eval_rollouts", 1, *QUICKLY]
    ended = command(*words, cwd=example, **cache)
    assert ended.code == 0, ended.err
    trained(example, "outputs/tiny", 2, 2 * TINY["batch_size"])
    assert len(list((example / "outputs/tiny").glob("picture-*.png"))) == 1


@pytest.mark.slow
def test_the_five_checks_of_the_folder_pass(example: Path) -> None:
    ended = command(*PYTHON, "test_multi_gpu.py", cwd=example)
    assert ended.code == 0 and "5 of 5 pass" in ended.out, ended.out[-3000:]


def test_the_documents_show_the_original_commands() -> None:
    guides = "".join((EXAMPLE / name).read_text() for name in ("README.md", "docs/MULTI_GPU.md"))
    flat = re.sub(r"\s*\\\n\s*", " ", guides)
    for line in (
        "python train_distillation.py --teacher_path",
        "--output_dir ./outputs/wan_t2i --batch_size 4 --multi_gpu",
        "torchrun --nproc_per_node=4 train_distillation.py",
        "torchrun --nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr=192.168.1.1 --master_port=29500",
        "python test_multi_gpu.py",
        "python run_inference.py --model_path",
    ):
        assert line in flat, line
    for heading in ("Prerequisites", "Two machines", "Batch", "Performance tips", "Is it working?"):
        assert f"\n## {heading}\n" in guides, heading
    text = (EXAMPLE.parent.parent / "docs/wan_distill.md").read_text()
    for name in ("wan_distill_learning", "wan_distill_speed"):
        assert f"<!-- {name}: written by benchmarks/figures.py -->" in text and f"<!-- end of {name} -->" in text
