"""What may change when a run is resumed, and what may not: every setting is classified, and the engine enforces it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import unisono
from unisono import Loss, Recipe
from unisono.cli.main import main
from unisono.config.fields import fields_of
from unisono.engine.run_folder import stored_settings
from unisono.engine.start.registry import BUILT_IN, load_recipe
from unisono.errors import UserError
from unisono.recipes.darkroom.recipe import Darkroom
from unisono.settings import Settings

# Settings that may change within a run, by the reason why that is harmless. All others must be in Recipe.fixed.
FREE: dict[str, dict[str, str]] = {
    "darkroom": {
        "the objective": "loss_positions label_smoothing",
        "regularisation": "tf_dropout tf_attn_dropout",
        "how tasks are played; which ones is fixed": "eval_episodes eval_repeats eval_train_tasks greedy",
    },
    "clips": {
        "where computed features are stored": "cache_dir",
        "how fast they are computed": "extract_workers",
        "a run without it had no bad file": "leave_out_bad",
        "a run without it had no links": "follow_links",
        "the objective": "score_loss ranking_weight",
        "regularisation": "dropout",
    },
    "seo": {
        "where tokens are stored": "cache_dir",
        "how fast a batch is computed": "length_groups padding",
        "a run without it had no bad row": "leave_out_bad",
        "the objective": "scale both_ways cross_loss",
        "regularisation": "lora_dropout",
    },
    "wan-flow": {
        "where the model lies; a LoRA's is known by its content": "model_path",
        "where and when samples are encoded": "cache_dir no_cache",
        "a run without it had no bad file": "leave_out_bad",
        "the objective": "sigma_sampling logit_mean logit_std mode_scale shift first_frame masked_loss unmasked_weight",
        "regularisation": "caption_dropout",
        "how fast attention is computed": "attention",
        "how the fixed held-out data is evaluated": "eval_levels",
        "what is looked at": "preview_prompts num_previews preview_steps guidance",
    },
    "wan-distill": {
        "where samples are stored": "cache_dir",
        "where and how fast the teacher computes": "teacher_device_strategy compile_teacher attention",
        "the objective": "velocity_weight flow_weight trajectory_weight few_step_weight feature_weight",
        "optimization": "score_learning_rate",
        "what is looked at": "sample_prompts num_previews",
    },
}
FREE_OF_THE_ENGINE = {
    "how long": "max_steps num_epochs",
    "numerics": "deterministic mixed_precision dtype tf32 compile cuda_graph quantize quantize_weight_gradient "
    "quantize_min_size",
    "memory": "activation_checkpointing activation_memory_gb recompute_every fit",
    "optimization": "learning_rate weight_decay beta1 beta2 epsilon grad_clip lr_schedule warmup_steps "
    "min_lr_ratio wsd_decay_ratio lr_scaling lr_scaling_batch max_skipped_steps ema_decay ema_warmup",
    "the model": "disable_dropout sync_batch_norm find_unused_parameters",
    "a limit": "max_bad_samples",
    "when, and at what size, held-out data is evaluated": "eval_every eval_first eval_batch_size preview_every",
    "what is kept": "best_metric best_mode save_every keep_last async_save mirror",
    "what is written": "log_every log_group_norms peak_tflops tensorboard track track_project",
}
HAS_ITS_OWN_CHECK = {"seed"}

SMALL: dict[str, Any] = {
    **{"grid_size": 3, "horizon": 4, "num_validation": 1, "n_stream": 2, "total_source_timesteps": 80},
    **{"train_source_timesteps": 40, "n_transit": 16, "tf_n_embd": 8, "tf_n_layer": 1, "tf_n_head": 2},
    **{"tf_n_inner": 8, "eval_episodes": 2, "eval_repeats": 1, "eval_train_tasks": 0, "batch_size": 4},
    **{"max_steps": 1, "warmup_steps": 0, "tensorboard": False, "preview_every": -1, "gpus": "0"},
}


def words(reasons: dict[str, str]) -> list[str]:
    return [name for names in reasons.values() for name in names.split()]


@pytest.mark.parametrize("recipe", BUILT_IN)
def test_every_setting_of_a_recipe_is_fixed_or_free_to_change(recipe: str) -> None:
    kind = load_recipe(recipe)
    settings, free = [field.name for field in fields(kind.Config)], words(FREE[recipe])
    assert not set(kind.fixed) & set(free), "classified twice"
    assert sorted([*kind.fixed, *free]) == sorted(settings), (
        "classify each setting: in Recipe.fixed if it decides what is trained on or held out, what a sample contains, "
        "or what the weights mean; otherwise in FREE above, with the reason"
    )


def test_every_setting_of_the_engine_is_fixed_or_belongs_to_a_start_or_is_free_to_change() -> None:
    free = words(FREE_OF_THE_ENGINE)
    classified = [*stored_settings.FIXED, *HAS_ITS_OWN_CHECK, *stored_settings._PER_START, *free]
    assert sorted(classified) == sorted(field.name for field in fields_of(Settings))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def darkroom_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("darkroom") / "run"
    unisono.train(Darkroom, None, **SMALL, output_dir=str(folder))
    return folder


@pytest.mark.parametrize(
    "name, value", [("env_split_seed", 1), ("grid_size", 4), ("num_validation", 2), ("tf_n_head", 1)]
)
def test_samples_that_were_trained_on_never_count_as_unseen(
    darkroom_run: Path, name: str, value: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = files_of(darkroom_run)
    arguments = ["--output_dir", str(darkroom_run), "--max_steps", "2", "--gpus", "0", f"--{name}", str(value)]
    assert main(["train", "darkroom", *arguments]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert f"{name} {value} differs from this run's {SMALL.get(name, 0)}" in line and "remove the flag" in line
    assert files_of(darkroom_run) == before, "exit 2: nothing was written"


WAN: dict[str, Any] = {
    **{"model_config": "tiny", "num_shapes": 32, "max_steps": 1, "batch_size": 4, "tensorboard": False},
    **{"eval_every": -1, "preview_every": -1, "gpus": "0"},
}


def test_the_data_of_a_wan_run_cannot_change_when_it_is_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    unisono.train("wan-flow", None, **WAN, output_dir=str(folder))
    before = files_of(folder)
    capfd.readouterr()
    for name, value in {"dataset_path": str(other), "num_shapes": 64, "num_frames": 5, "num_eval": 2}.items():
        arguments = ["--output_dir", str(folder), "--max_steps", "2", "--gpus", "0", f"--{name}", str(value)]
        assert main(["train", "wan-flow", *arguments]) == 2
        [line] = capfd.readouterr().err.splitlines()
        assert f"{name} {value} differs from this run's " in line and "remove the flag" in line
        assert files_of(folder) == before, "exit 2: nothing was written"


def test_the_error_about_a_changed_config_value_names_the_flag_that_continues(
    darkroom_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "room.yaml").write_text("grid_size: 5\n")
    arguments = ["--config", str(tmp_path / "room.yaml"), "--output_dir", str(darkroom_run), "--gpus", "0"]
    assert main(["train", "darkroom", *arguments]) == 2
    stderr = capfd.readouterr().err
    assert "grid_size 5 (config file) differs from this run's 3" in stderr and "pass --grid_size 3, or" in stderr
    assert main(["train", "darkroom", *arguments, "--grid_size", "3"]) == 0


class Lines(Recipe):
    """A user's recipe that marks a setting as data-defining."""

    fixed: ClassVar[tuple[str, ...]] = ("data_path", "every")

    @dataclass
    class Config:
        data_path: str = ""
        every: int = 1
        slope: float = 1.0

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def dataset(self, split: str) -> Any:
        numbers = [float(line) for line in Path(self.config.data_path).read_text().split()][:: self.config.every]
        return [torch.tensor([number]) for number in numbers] if split == "train" else None

    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        error = (model(batch) - self.config.slope * batch).square()
        return Loss(error.sum(), len(batch))


@pytest.fixture
def lines_run(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "numbers.txt").write_text("1 2 3 4 5 6 7 8")
    settings = {"batch_size": 2, "tensorboard": False, "gpus": "0", "output_dir": str(tmp_path / "run"), "max_steps": 1}
    unisono.train(Lines, {"data_path": str(tmp_path / "numbers.txt")}, **settings)
    return settings | {"max_steps": 2}


@pytest.mark.parametrize(
    "changed", [{"every": 2}, {"shuffle": False}, {"data_path": "other.txt"}, {"optimizer": "rmsprop"}]
)
def test_a_recipes_own_fixed_settings_the_order_of_samples_and_the_optimizer_cannot_change(
    lines_run: dict[str, Any], tmp_path: Path, changed: dict[str, Any]
) -> None:
    before = files_of(tmp_path)
    [name] = changed
    with pytest.raises(UserError, match=rf"{name} .* differs from this run's .*cannot change within a run"):
        unisono.train(Lines, changed, **lines_run)
    assert files_of(tmp_path) == before


def test_the_name_of_the_optimizer_ignores_case(lines_run: dict[str, Any], tmp_path: Path) -> None:
    same = {"data_path": str(tmp_path / "numbers.txt"), "optimizer": "AdamW"}
    assert unisono.train(Lines, same, **lines_run).step == 2


def test_a_checkpoint_without_its_run_takes_fixed_settings_from_the_user(
    lines_run: dict[str, Any], tmp_path: Path
) -> None:
    common = {"data_path": str(tmp_path / "numbers.txt")}
    elsewhere = tmp_path / "moved" / "step_00000001"  # only the checkpoint was copied to another machine
    (tmp_path / "run" / "checkpoints" / elsewhere.name).rename(elsewhere.parent.mkdir() or elsewhere)
    settings = lines_run | {"output_dir": str(tmp_path / "new"), "resume": str(elsewhere), "shuffle": False}
    assert unisono.train(Lines, common, **settings).step == 2


def test_other_settings_may_change_and_data_may_be_found_by_another_path(
    lines_run: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "link.txt").symlink_to(tmp_path / "numbers.txt")
    result = unisono.train(Lines, {"data_path": str(tmp_path / "link.txt"), "slope": 2.0}, **lines_run)
    assert result.step == 2


def test_data_that_was_moved_is_found_under_its_new_path(
    lines_run: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "moved").mkdir()
    moved = (tmp_path / "numbers.txt").rename(tmp_path / "moved" / "numbers.txt")
    other = tmp_path / "other.txt"
    other.write_text("9 8 7 6 5 4 3 2")
    with pytest.raises(UserError, match=r"data_path .*if the data was moved, pass a path that ends in numbers.txt"):
        unisono.train(Lines, {"data_path": str(other)}, **lines_run)
    assert unisono.train(Lines, {"data_path": str(moved)}, **lines_run).step == 2
    assert f"data_path {tmp_path / 'numbers.txt'} → {moved}" in capfd.readouterr().err


def test_a_run_whose_data_has_grown_says_that_held_out_samples_may_have_been_trained_on(
    lines_run: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    numbers = tmp_path / "numbers.txt"
    numbers.write_text(f"{numbers.read_text()} 9")
    assert unisono.train(Lines, {"data_path": str(numbers)}, **lines_run).step == 2
    note = " ".join(capfd.readouterr().err.split())
    assert "the dataset had 8 samples before and has 9 now" in note
    assert "samples that are held out now may have been trained on" in note


def test_a_folder_named_like_a_built_in_set_is_not_that_set(tmp_path: Path) -> None:
    (tmp_path / "shapes").mkdir()
    assert not stored_settings._is_same(str(tmp_path / "shapes"), "shapes")
    assert stored_settings._is_same(str(tmp_path / "shapes"), "elsewhere/shapes")
    assert not stored_settings._is_same(str(tmp_path / "missing"), "elsewhere/missing"), "neither exists"


@pytest.mark.parametrize("changed", [{"every": 2}, {"seed": 7}])
def test_the_error_for_a_branch_in_a_new_folder_does_not_suggest_a_new_folder(
    lines_run: dict[str, Any], tmp_path: Path, changed: dict[str, Any]
) -> None:
    own = {name: value for name, value in changed.items() if name == "every"}
    branch = lines_run | {"output_dir": str(tmp_path / "branch"), "resume": lines_run["output_dir"]}
    branch |= {name: value for name, value in changed.items() if name == "seed"}
    with pytest.raises(UserError, match=r"or remove --resume$"):
        unisono.train(Lines, own, **branch)
    assert not (tmp_path / "branch").exists()
