"""Flags of other trainers are answered with unisono's equivalent, not with an absurd guess."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from unisono.config.fields import fields_by_name
from unisono.config.foreign import ANSWERS, FOREIGN
from unisono.engine.start.registry import BUILT_IN, load_recipe, recipes_with
from unisono.engine.start.run import configure
from unisono.errors import ConfigError
from unisono.settings import Settings


def refused(recipe: str, *flags: str, **more: object) -> str:
    with pytest.raises(ConfigError) as caught:
        configure(load_recipe(recipe), flags=flags, **more)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "flag", "answer"),
    [
        ("wan-flow", "--log_with", "here it is --track"),
        ("wan-flow", "--use_wandb", "--track wandb,mlflow sends metrics to trackers"),
        ("wan-flow", "--wandb_api_key", "set the environment variable WANDB_API_KEY"),
        ("wan-flow", "--repeats", "every sample is used once per epoch; train longer with --num_epochs"),
        ("wan-flow", "--fp8_scaled", "--base_precision stores frozen weights in 8 or 4 bit"),
        ("wan-flow", "--blocks_to_swap", "here it is --blocks_on_host"),
        (
            "wan-flow",
            "--offload_models",
            "--blocks_on_host stores blocks in host memory",
        ),
        ("wan-flow", "--use_8bit_adam", "use --optimizer adamw8bit"),
        ("wan-flow", "--num_train_epochs", "here it is --num_epochs"),
        ("wan-distill", "--timestep_sampling", "here it is --sigma_sampling"),
        ("clips", "--lora_rank", "--lora_rank is a setting of wan-flow, wan-distill and seo, not of this recipe"),
        ("clips", "--network-dim", "--lora_rank is a setting of wan-flow, wan-distill and seo, not of this recipe"),
        ("clips", "--per-device-train-batch-size", "here it is --batch_size"),
        ("darkroom", "--report_to", "here it is --track"),
        ("wan-flow", "--dataset_config", "put the settings into a YAML file and pass it with --config"),
        ("seo", "--deepspeed", "DeepSpeed is not supported; --strategy fsdp shards"),
        ("seo", "--accumulate_grad_batches", "here it is --gradient_accumulation_steps"),
    ],
)
def test_a_flag_of_another_trainer_gets_a_suggestion(recipe: str, flag: str, answer: str) -> None:
    message = refused(recipe, flag, "3")
    assert message.startswith(f"unknown flag {flag}; {answer}")
    assert "did you mean" not in message


def test_a_config_key_of_another_trainer_gets_a_suggestion_without_dashes(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("num_train_epochs: 3\n")
    assert refused("darkroom", file=file) == f"unknown field num_train_epochs in {file}; here it is num_epochs"
    message = refused("clips", overrides={"lora_rank": 4})
    assert message == (
        "unknown field lora_rank in the settings passed in Python; lora_rank is a setting of wan-flow, wan-distill and "
        "seo, not of this recipe"
    )


@pytest.mark.parametrize("flag", ["--wide_log", "--reprats", "--fp9_scales"])
def test_a_flag_unlike_all_others_gets_no_suggestion(flag: str) -> None:
    assert refused("wan-flow", flag, "3") == f"unknown flag {flag}; --help lists all flags"


def test_a_suggestion_never_names_a_flag_that_the_recipe_does_not_have() -> None:
    # Answers about caching latents only make sense for wan-flow, not for darkroom.
    for flag in ("--cache_latents", "--sigmoid_scale", "--resolution"):
        named = set(re.findall(r"--(\w+)", refused("darkroom", flag, "3").partition(";")[2])) - {"help"}
        assert named <= set(configure(load_recipe("darkroom")).values)
        assert "did you mean" not in refused("wan-flow", flag, "3")


def test_every_suggestion_names_settings_that_exist() -> None:
    ours = set(fields_by_name((Settings,)))
    for recipe in BUILT_IN:
        ours |= set(fields_by_name((load_recipe(recipe).Config,)))
    for answer in {*ANSWERS.values()}:
        assert set(re.findall(r"--(\w+)", answer)) - {"config", "step"} <= ours, answer
    assert set(FOREIGN.values()) <= ours
    assert not {*fields_by_name((Settings,))} & {*ANSWERS, *FOREIGN}, "a setting of ours is nobody else's"
    assert not set(ANSWERS) & set(FOREIGN), "two answers for one flag"
    assert recipes_with("lora_rank") == ["wan-flow", "wan-distill", "seo"]
