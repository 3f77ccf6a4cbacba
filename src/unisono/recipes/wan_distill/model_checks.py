"""Checks that need the teacher's configuration or files. They run before the teacher generates anything."""

from __future__ import annotations

from unisono.errors import ConfigError
from unisono.recipes.wan.models.load import build_meta
from unisono.recipes.wan.models.lora import open_lora, targeted
from unisono.recipes.wan.models.weights import open_weights
from unisono.recipes.wan_distill.models.pruning import check_plan
from unisono.recipes.wan_distill.models.student import complete_config
from unisono.recipes.wan_distill.setup import Setup
from unisono.recipes.wan_flow.model_checks import lora_targets


def check_models(setup: Setup) -> None:
    """Raises ConfigError if the prompts, the student or the files do not fit the teacher."""
    _ = setup.prompts, setup.preview_prompts, setup.student, setup.shape  # computing these properties checks them
    setup.encoders.check_files()
    for path in setup.teacher.transformers.values():
        open_weights(path)
    if setup.config.objective == "dmd2":
        _check_loras(setup)
    elif setup.config.init == "teacher":
        check_plan(complete_config(setup.teacher_config), complete_config(setup.student.config), setup.config.layers)
    if setup.config.feature_weight:
        _check_features(setup)


def _check_features(setup: Setup) -> None:
    if len(setup.teacher.transformers) > 1:
        raise ConfigError(
            "feature_weight: a teacher of two experts has no single layer to compare with; remove feature_weight"
        )
    student, teacher = (
        config["num_attention_heads"] * config["attention_head_dim"]
        for config in (setup.student.config, setup.teacher_config)
    )
    if student != teacher:
        raise ConfigError(
            f"feature_weight compares layers of the same width, but the student's is {student} and the teacher's "
            f"{teacher}; remove feature_weight, or use a student of width {teacher}"
        )


def _check_loras(setup: Setup) -> None:
    """Raises ConfigError if the teacher lacks one of lora_targets, or if the user's LoRA does not fit the teacher."""
    for name in setup.teacher.transformers:
        transformer = build_meta(setup.teacher_config)
        if setup.config.lora_rank:
            targeted(transformer, lora_targets(setup.config))
        if setup.lora:
            lora = open_lora(transformer, setup.lora, part=name)
            if lora.kind != "lora":
                raise ConfigError(
                    f"lora_path {setup.lora}: only a plain LoRA can be part of the teacher, not a {lora.kind}"
                )
