"""examples/darkroom: the commands and files of other implementations run as written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import scripts
from command_line import Ended, lines
from unisono.config import Resolved, resolve
from unisono.engine.start.run import configure
from unisono.errors import ConfigError
from unisono.recipes.darkroom.data.histories import read_histories
from unisono.recipes.darkroom.foreign_config import ALIASES, translate
from unisono.recipes.darkroom.recipe import Darkroom
from unisono.recipes.darkroom.rooms import Darkroom as Room
from unisono.settings import Settings

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/darkroom"
MODELS = ("ad_dr", "ad_dr_compressed")
ALGORITHMS = ("explorer", "q_learning", "noise", "ppo_darkroom")


def resolved(*files: Path) -> Resolved:
    return resolve((Settings, Darkroom.Config), file=files, aliases=ALIASES, translate=translate)


def from_text(folder: Path, text: str) -> Resolved:
    file = folder / "given.yaml"
    file.write_text(text)
    return resolved(file)


def refused(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        from_text(folder, text)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


# --- keys: each takes effect, or is rejected with the reason

ACT = [
    # a room
    ("env: dark_key_to_door", "env", "dark_key_to_door"),
    ("grid_size: 7", "grid_size", 7),
    ("horizon: 30", "horizon", 30),
    ("env_split_seed: 3", "env_split_seed", 3),
    ("train_env_ratio: 0.5", "train_env_ratio", 0.5),
    # a source learner
    ("alg: PPO", "source", "ppo"),
    ("alg: q_learning", "source", "q_learning"),
    ("alg: Q", "source", "q_learning"),
    ("alg: noise", "source", "noise"),
    ("alg: explorer", "source", "explorer"),
    ("n_steps: 81", "n_steps", 81),
    ("alg: PPO\nbatch_size: 41", "source_batch_size", 41),
    ("n_epochs: 21", "n_epochs", 21),
    ("alg_seed: 43", "alg_seed", 43),
    ("total_source_timesteps: 99", "total_source_timesteps", 99),
    ("n_stream: 11", "n_stream", 11),
    ("source_lr: 0.5", "source_lr", 0.5),
    # a model
    ("use_compressed_context: true", "use_compressed_context", True),
    ("compress_interval: 81", "compress_interval", 81),
    ("tf_n_embd: 32", "tf_n_embd", 32),
    ("tf_n_layer: 2", "tf_n_layer", 2),
    ("tf_n_head: 8", "tf_n_head", 8),
    ("tf_dropout: 0.3", "tf_dropout", 0.3),
    ("tf_attn_dropout: 0.4", "tf_attn_dropout", 0.4),
    ("tf_n_inner: 99", "tf_n_inner", 99),
    ("n_transit: 160", "n_transit", 160),
    ("lr: 0.0123", "learning_rate", 0.0123),
    ("train_batch_size: 513", "batch_size", 513),
    ("test_batch_size: 2049", "eval_batch_size", 2049),
    ("train_source_timesteps: 999", "train_source_timesteps", 999),
    ("train_timesteps: 12345", "max_steps", 12345),
    ("num_warmup_steps: 77", "warmup_steps", 77),
    ("mixed_precision: 'fp16'", "mixed_precision", "fp16"),
    ("gradient_accumulation_steps: 5", "gradient_accumulation_steps", 5),
    ("num_workers: 9", "num_workers", 9),
    ("label_smoothing: 0.1", "label_smoothing", 0.1),
    ("beta1: 0.8", "beta1", 0.8),
    ("beta2: 0.7", "beta2", 0.7),
    ("weight_decay: 0.6", "weight_decay", 0.6),
    ("summary_interval: 17", "log_every", 17),
    ("eval_interval: 18", "eval_every", 18),
    ("gen_interval: 19", "preview_every", 19),
    ("ckpt_interval: 23", "save_every", 23),
    ("train_n_stream: 29", "train_n_stream", 29),
]
SAY_WHAT_HAPPENS_ANYWAY = [
    ("model: AD", "model: CAD"),
    ("dynamics: False", "dynamics: True"),
    ("flash_attn: True", "flash_attn: no"),
    ("dim_states: 2", "dim_states: 3"),
    ("dim_actions: 1", "dim_actions: 2"),
    ("num_actions: 5", "num_actions: 4"),
    ("policy: MlpPolicy", "policy: CnnPolicy"),
    ("tensorboard_log: None", "tensorboard_log: tb"),
    ("max_reward: 20", "max_reward: 19"),
    ("horizon: 30\nmax_reward: 30", "horizon: 30\nmax_reward: 20"),
    ("env: dark_key_to_door\nhorizon: 50\nmax_reward: 2", "env: dark_key_to_door\nmax_reward: 20"),
]
CANNOT_BE = [
    "n_process: 8",
    "device: cpu",
    "on_policy_threshold: 0.7",
    "compression_window: 10",
    "dynamics_strength: 1",
]


@pytest.mark.parametrize(("text", "name", "value"), ACT, ids=[text for text, _, _ in ACT])
def test_a_key_of_other_implementations_takes_effect(tmp_path: Path, text: str, name: str, value: object) -> None:
    assert from_text(tmp_path, text).values[name] == value


@pytest.mark.parametrize(("same", "other"), SAY_WHAT_HAPPENS_ANYWAY)
def test_a_key_with_one_possible_value_rejects_others(tmp_path: Path, same: str, other: str) -> None:
    from_text(tmp_path, same)
    key, value = other.splitlines()[-1].split(": ")
    message = refused(tmp_path, other)
    assert message.startswith(f"{key}: expected ") and ", because " in message and f"got {value} " in message


@pytest.mark.parametrize("text", CANNOT_BE)
def test_a_key_without_effect_is_rejected_with_the_reason(tmp_path: Path, text: str) -> None:
    message = refused(tmp_path, text)
    assert message.startswith(text.split(":")[0] + " has no effect: ") and message.endswith("given.yaml); remove it")


@pytest.mark.parametrize("text", [text for text, _, _ in ACT] + [same for same, _ in SAY_WHAT_HAPPENS_ANYWAY])
def test_every_key_is_a_flag_too(tmp_path: Path, text: str) -> None:
    file = tmp_path / "given.yaml"
    file.write_text(text.splitlines()[0])
    key, value = text.splitlines()[0].split(": ")
    by_flag = configure(Darkroom, flags=[f"--{key}", value.strip("'")])
    assert by_flag.values == configure(Darkroom, file=file).values


@pytest.mark.parametrize("text", [other for _, other in SAY_WHAT_HAPPENS_ANYWAY if "\n" not in other] + CANNOT_BE)
def test_a_flag_is_rejected_like_its_key(tmp_path: Path, text: str) -> None:
    key, value = text.split(": ")
    with pytest.raises(ConfigError) as caught:
        configure(Darkroom, flags=[f"--{key}={value}"])
    assert str(caught.value) == refused(tmp_path, text).replace(f"{tmp_path / 'given.yaml'}", "the command line")


def test_batch_size_in_an_algorithm_file_is_that_of_the_source_learner(tmp_path: Path) -> None:
    before = resolve((Settings, Darkroom.Config)).values["batch_size"]
    assert from_text(tmp_path, "alg: PPO\nbatch_size: 40").values["batch_size"] == before
    everything_in_one = from_text(tmp_path, "alg: PPO\nbatch_size: 40\ntrain_batch_size: 300").values
    assert (everything_in_one["batch_size"], everything_in_one["source_batch_size"]) == (300, 40)
    ours = from_text(tmp_path, "source: ppo\nbatch_size: 40").values
    assert ours["batch_size"] == 40 != ours["source_batch_size"], "in our own words it is the transformer's"


def test_unknown_and_contradictory_algorithms_are_rejected(tmp_path: Path) -> None:
    assert "alg: expected one of ppo, explorer, rmax, q, q_learning, noise, eps, got 'DQN'" in refused(
        tmp_path, "alg: DQN"
    )
    assert "alg ('ppo') and source ('noise') are the same setting" in refused(tmp_path, "alg: PPO\nsource: noise")
    assert "did you mean tf_n_embd?" in refused(tmp_path, "tf_n_embed: 3")


def test_every_key_of_the_config_files_is_tested_here() -> None:
    tested = {text.splitlines()[-1].split(":")[0] for text, _, _ in ACT}
    tested |= {text.splitlines()[-1].split(":")[0] for text, _ in SAY_WHAT_HAPPENS_ANYWAY}
    ours = {"include", "lr_schedule", "source_noise"}
    for file in (EXAMPLE / "config").rglob("*.yaml"):
        assert set(yaml.safe_load(file.read_text())) <= tested | ours, file


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_config_files_have_the_values_of_the_guide(model: str, algorithm: str) -> None:
    files = [EXAMPLE / f"config/{name}.yaml" for name in ("env/darkroom", f"algorithm/{algorithm}", f"model/{model}")]
    values = resolved(*files).values
    sizes = {"n_transit": 240, "tf_n_embd": 64, "tf_n_layer": 4, "tf_n_head": 4, "tf_n_inner": 128, "tf_dropout": 0.1}
    training = {"learning_rate": 3e-4, "batch_size": 512, "eval_batch_size": 2048, "max_steps": 50000}
    training |= {"warmup_steps": 1000, "lr_schedule": "cosine", "beta2": 0.99, "mixed_precision": "no"}
    for name, value in (sizes | training).items():
        assert values[name] == value, name
    assert values["source"] == algorithm.removesuffix("_darkroom")
    assert values["use_compressed_context"] == (model == "ad_dr_compressed")


# --- commands


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example folder, so that tests leave no files in the original."""
    place = tmp_path_factory.mktemp("examples") / "darkroom"
    shutil.copytree(EXAMPLE, place, ignore=shutil.ignore_patterns("runs", "datasets", "logs", "__pycache__"))
    return place


PYTHON = [sys.executable]
ACCELERATE = [*PYTHON, "-m", "accelerate.commands.accelerate_cli", "launch"]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone"]


def command(*words: object, cwd: Path, **more: str) -> Ended:
    """Runs a program without a user's accelerate config."""
    return scripts.command(*words, cwd=cwd, **{"HF_HOME": str(cwd / "no_accelerate_config"), **more})


def settings_of(ended: Ended) -> dict[str, Any]:
    assert ended.code == 0, ended.err
    output = yaml.safe_load(ended.out)
    assert isinstance(output, dict)
    return output


def test_train_py_reads_its_files_and_flags_win(example: Path) -> None:
    result = settings_of(command(*PYTHON, "train.py", "--print_config", "--train_timesteps", 7, cwd=example))
    assert (result["max_steps"], result["batch_size"], result["source"]) == (7, 512, "explorer")
    assert (result["gpus"], result["use_compressed_context"]) == ("1", True)


def test_an_edit_of_the_model_file_takes_effect(example: Path) -> None:
    file = example / "config/model/ad_dr_compressed.yaml"
    before = file.read_text()
    file.write_text(before.replace("mixed_precision: 'no'", "mixed_precision: 'fp16'").replace(": 512", ": 128"))
    try:
        result = settings_of(command(*PYTHON, "train.py", "--print_config", cwd=example))
    finally:
        file.write_text(before)
    assert (result["mixed_precision"], result["batch_size"]) == ("fp16", 128)


def test_train_py_accepts_more_files_and_works_from_another_folder(example: Path, tmp_path: Path) -> None:
    files = [f"--config={example / 'config' / name}" for name in ("algorithm/ppo_darkroom.yaml", "model/ad_dr.yaml")]
    result = settings_of(command(*PYTHON, example / "train.py", *files, "--print_config", "--gpus=all", cwd=tmp_path))
    assert (result["source"], result["source_batch_size"], result["batch_size"]) == ("ppo", 40, 512)
    assert (result["use_compressed_context"], result["gpus"]) == (False, "all")


@pytest.mark.parametrize("script", ["train_multi_gpu.sh", "launch_multi_gpu.sh", "multi_gpu_train.slurm"])
def test_a_script_is_valid_and_can_be_executed(script: str) -> None:
    subprocess.run(["bash", "-n", EXAMPLE / script], check=True)
    assert script.endswith(".slurm") or os.access(EXAMPLE / script, os.X_OK)


def test_launch_multi_gpu_rejects_what_is_not_a_number(example: Path) -> None:
    ended = command("./launch_multi_gpu.sh", "two", cwd=example)
    assert (ended.code, ended.err) == (2, "launch_multi_gpu.sh: expected a number of GPUs or all, got 'two'\n")


HISTORIES = [
    *("--grid_size", 3, "--horizon", 4, "--num_validation", 1),
    *("--n_stream", 2, "--total_source_timesteps", 80, "--n_transit", 18),
]
TINY = [
    *HISTORIES,
    *("--train_n_stream", 2, "--train_source_timesteps", 40, "--compress_interval", 8),
    *("--train_timesteps", 2, "--train_batch_size", 8, "--test_batch_size", 8, "--num_workers", 0),
    *("--tf_n_embd", 16, "--tf_n_layer", 1, "--tf_n_head", 2, "--eval_episodes", 2, "--eval_repeats", 1),
    *("--summary_interval", 1, "--num_warmup_steps", 1),
]

TWO = ["--multi_gpu", "--num_processes", 2, "--main_process_port", 0]  # as accelerate does on a machine with GPUs
COMMANDS = {
    "accelerate two": ([*ACCELERATE, *TWO, "train.py"], 2, "no"),
    "torchrun": ([*TORCHRUN, "--nproc_per_node=2", "train.py"], 2, "no"),
    "python": ([*PYTHON, "train.py"], 1, "no"),
    "accelerate": ([*ACCELERATE, "train.py"], 1, "no"),
    "accelerate gpu ids": ([*ACCELERATE, "--num_processes", 1, "--gpu_ids", "0,1", "train.py"], 1, "no"),
    "accelerate fp16": ([*ACCELERATE, "--mixed_precision", "fp16", "train.py"], 1, "fp16"),
    "train_multi_gpu.sh": (["./train_multi_gpu.sh"], 1, "no"),
    "launch_multi_gpu.sh": (["./launch_multi_gpu.sh", 2, "config/model/ad_dr.yaml"], 2, "no"),
    "multi_gpu_train.slurm": (["bash", "multi_gpu_train.slurm"], 1, "no"),
}
QUICK = ("accelerate two",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS]
)
def test_a_command_of_the_guide_trains_and_prints_the_summary(name: str, example: Path) -> None:
    words, processes, precision = COMMANDS[name]
    folder = f"runs/{name.replace(' ', '-')}"
    ended = command(*words, *TINY, "--output_dir", folder, cwd=example, SLURM_JOB_ID="7")
    assert ended.code == 0, ended.err
    output = ended.out + ended.err
    for line in (
        f"Number of processes: {processes}",
        f"Distributed type: {'none (one process)' if processes == 1 else 'data parallel (ddp) on CPUs'}",
        f"Mixed precision: {precision}",
        "Gradient accumulation steps: 1",
        "Main process device: cpu",
    ):
        assert output.count(line) == 1, output
    record = json.loads((example / folder / "run.json").read_text())
    assert (record["config"]["max_steps"], record["starts"][0]["world"]) == (2, processes)
    assert [line["step"] for line in lines(example / folder) if "loss" in line] == [1, 2]
    assert list((example / folder / "tb").rglob("*tfevents*")), "tensorboard --logdir runs/"


def test_collected_histories_are_one_file_and_train_py_uses_it(example: Path) -> None:
    ended = command(*PYTHON, "collect.py", *HISTORIES, cwd=example)
    file = example / "datasets/history_darkroom_explorer_alg-seed42.hdf5"
    assert ended.code == 0 and ended.out.splitlines()[-1] == str(file.relative_to(example)), ended
    assert list((example / "datasets").iterdir()) == [file], "nothing else is left"
    histories = read_histories(file, Room(3, 4), range(9), num_streams=2, num_steps=40)
    assert histories.actions.shape == (9, 2, 40) and histories.rewards.any()

    before = set((example / "runs").glob("*"))
    ended = command(*PYTHON, "train.py", "--traj_dir", "datasets", *TINY, cwd=example)
    assert ended.code == 0, ended.err
    [run] = set((example / "runs").glob("*")) - before
    assert run.name.startswith("darkroom-"), "tensorboard --logdir runs/"
    assert not list(run.rglob("*.hdf5")), "it did not collect again"


def test_collect_does_not_overwrite_a_file(example: Path) -> None:
    file = example / "datasets/history_darkroom_PPO_alg-seed7.hdf5"
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    words = ["--config", "config/algorithm/ppo_darkroom.yaml", "--alg_seed", 7]
    ended = command(*PYTHON, "collect.py", *words, cwd=example)
    file_again = file.read_text()
    file.unlink()
    assert (ended.code, file_again) == (2, "mine")
    assert ended.err.startswith("collect.py: datasets/history_darkroom_PPO_alg-seed7.hdf5 already exists")
