"""Validates the settings before anything is loaded or written."""

from __future__ import annotations

import math
from typing import Any

from unisono.errors import ConfigError
from unisono.recipes.common.checks import check_paths, check_range
from unisono.recipes.wan.checks import check_frames, check_prompts

_PATHS = ("teacher_path", "parts_path", "student_config", "data_path", "eval_data_path", "cache_dir", "lora_path")
_WEIGHTS = ("velocity_weight", "flow_weight", "trajectory_weight", "few_step_weight", "feature_weight")
_ONLY_REGRESSION = {
    **{"student_config": None, "init": "teacher", "layers": "even", "online": False, "refresh_every": 0},
    **{"velocity_weight": 1.0, **dict.fromkeys(_WEIGHTS[1:], 0.0)},
}
"""Settings that apply only to the objective regression, and their defaults."""
_LARGEST_RANK = 2**14
_AT_LEAST = {"height": 0, "width": 0, "refresh_every": 0, "num_previews": 1}
_AT_LEAST |= dict.fromkeys(
    ("rollouts", "eval_rollouts", "rollout_batch", "teacher_steps", "pairs", "eval_levels", "score_steps"), 1
)
_AT_LEAST |= dict.fromkeys(("trajectory_points", "few_steps", "score_steps"), 1)
_AT_MOST = {"height": 16_384, "width": 16_384, "num_frames": 100_001, "rollout_batch": 65_536, "teacher_steps": 1000}
_AT_MOST |= {
    "eval_rollouts": 1_000_000,
    "trajectory_points": 1000,
    "pairs": 1000,
    "eval_levels": 1000,
    "few_steps": 1000,
    "num_previews": 10_000,
    "rollouts": 1_000_000,
    "score_steps": 1000,
}


def check_config(config: Any) -> None:
    """Raises ConfigError if a value is out of range or if settings contradict each other."""
    if not config.teacher_path:
        raise ConfigError(
            "no teacher: pass --teacher_path FOLDER (a Wan model in diffusers' layout, or a hub id such as "
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers), or --teacher_path tiny to try it out without a download"
        )
    check_paths(config, _PATHS)
    if not config.data_path:
        raise ConfigError("no prompts: pass --data_path FILE, a text file with one prompt per line")
    if config.data_path == "shapes" and str(config.teacher_path).lower() != "tiny":
        raise ConfigError("data_path shapes needs the tiny teacher; pass a text file with one prompt per line")
    check_range(config, _AT_LEAST, _AT_MOST)
    if config.objective == "dmd2":
        _check_dmd2(config)
    elif config.lora_path:
        raise ConfigError("lora_path: only --objective dmd2 can add your LoRA to the teacher; remove lora_path")
    for name in _WEIGHTS:
        if not 0 <= getattr(config, name) < math.inf:
            raise ConfigError(f"{name}: expected a number of at least 0, got {getattr(config, name)}")
    if not any(getattr(config, name) for name in _WEIGHTS):
        raise ConfigError(f"all of {', '.join(_WEIGHTS)} are 0, so there is no loss; set at least one of them")
    for name in ("guidance", "guidance_2"):
        if not math.isfinite(getattr(config, name) or 0.0):
            raise ConfigError(f"{name}: expected a finite number, got {getattr(config, name)}")
    if not 0 < config.shift < math.inf:
        raise ConfigError(f"shift: expected a number above 0, got {config.shift}")
    check_frames(config.num_frames)
    if bool(config.height) != bool(config.width):
        raise ConfigError("height and width: set both, or neither")
    if config.num_eval is not None and config.num_eval < 0:
        raise ConfigError(f"num_eval: expected at least 0, got {config.num_eval}")
    if config.few_step_weight and config.teacher_steps % config.few_steps:
        raise ConfigError(
            f"few_steps {config.few_steps}: the student's steps are a subset of the teacher's {config.teacher_steps}; "
            "make teacher_steps a multiple of few_steps"
        )
    if config.eval_data_path and config.num_eval:
        raise ConfigError("eval_data_path and num_eval both hold out prompts; remove one of them")
    if config.trajectory_weight and config.few_step_weight:
        raise ConfigError(
            "trajectory_weight and few_step_weight need different points of a trajectory; remove one of them"
        )
    check_prompts(config, "sample_prompts")
    if not config.negative_prompt.isprintable():
        raise ConfigError("negative_prompt: expected one line of text")
    _check_online(config)


def _check_dmd2(config: Any) -> None:
    for name, usual in _ONLY_REGRESSION.items():
        if getattr(config, name) != usual:
            raise ConfigError(
                f"{name}: the objective dmd2 trains a student of the teacher's architecture on its own samples; remove "
                f"{name}, or use --objective regression"
            )
    if config.teacher_device_strategy == "balanced":
        raise ConfigError("teacher_device_strategy balanced: objective dmd2 does not support it; use auto, gpu or cpu")
    if not 0 <= config.lora_rank <= _LARGEST_RANK:
        raise ConfigError(f"lora_rank: expected a whole number from 0 to {_LARGEST_RANK}, got {config.lora_rank}")
    if config.lora_alpha is not None and not 0 < config.lora_alpha < math.inf:
        raise ConfigError(f"lora_alpha: expected a number above 0, got {config.lora_alpha}")
    if config.score_learning_rate is not None and not 0 < config.score_learning_rate < math.inf:
        raise ConfigError(f"score_learning_rate: expected a number above 0, got {config.score_learning_rate}")
    if not config.lora_rank:
        for name in ("lora_alpha", "lora_targets", "lora_path"):
            if getattr(config, name):
                raise ConfigError(f"{name}: with lora_rank 0 all weights are trained; remove {name}, or set lora_rank")
    elif config.teacher_dtype == "float8":
        raise ConfigError(
            "teacher_dtype float8: the teacher is the frozen base of the LoRAs; use --base_precision fp8, int8 or nf4"
        )


def _check_online(config: Any) -> None:
    if config.refresh_every and not config.online:
        raise ConfigError("refresh_every: new samples need the teacher in memory; add --online")
    if config.online and (config.trajectory_weight or config.few_step_weight):
        raise ConfigError(
            "online queries the teacher at new noise levels only; remove trajectory_weight and few_step_weight"
        )
    if config.feature_weight and not config.online:
        raise ConfigError("feature_weight: roll-outs contain no hidden states; add --online")
    if config.feature_weight and config.init != "teacher":
        raise ConfigError("feature_weight compares layers that the student takes from the teacher; remove --init fresh")
    if config.teacher_device_strategy == "balanced" and not config.online:
        raise ConfigError(
            "teacher_device_strategy balanced needs --online: for roll-outs each GPU has its own copy of the teacher; "
            "use cpu to keep one block at a time on the GPU"
        )
    if config.teacher_device_strategy == "balanced" and config.teacher_dtype == "float8":
        raise ConfigError("teacher_device_strategy balanced does not support teacher_dtype float8; use one of them")
