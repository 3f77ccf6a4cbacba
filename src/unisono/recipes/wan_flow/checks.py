"""Validates the settings before anything is loaded or written."""

from __future__ import annotations

import math
from typing import Any

from unisono.errors import ConfigError
from unisono.recipes.common.checks import check_paths, check_range
from unisono.recipes.wan.checks import check_frames, check_prompts
from unisono.recipes.wan.settings import TINY_NAMES

_AT_LEAST = {"num_eval": 0, "height": 0, "width": 0, "max_pixels": 0, "lora_rank": 0, "num_previews": 0, "fps": 0}
_AT_LEAST |= {"eval_levels": 1, "preview_steps": 1, "caption_dropout": 0, "first_frame": 0, "unmasked_weight": 0}
_AT_MOST = {"num_frames": 100_001, "eval_levels": 1000, "preview_steps": 1000, "num_previews": 10_000}
_AT_MOST |= {"height": 16_384, "width": 16_384, "fps": 1000, "lora_rank": 16_384, "num_shapes": 1_000_000}
_AT_MOST |= {"caption_dropout": 1, "first_frame": 1, "unmasked_weight": 1}
_MOST_PIXELS = 2**30  # maximum per sample, because all frames of a sample are in memory at once
_PATHS = ("model_path", "model_config", "parts_path", "dataset_path", "eval_dataset_path", "cache_dir", "lora_path")
_FINITE = ("logit_mean", "logit_std", "mode_scale", "guidance")


def check_config(config: Any) -> None:
    """Raises ConfigError if a value is out of range or if settings contradict each other."""
    check_paths(config, _PATHS)
    check_range(config, _AT_LEAST, _AT_MOST)
    for name in _FINITE:
        if not math.isfinite(getattr(config, name)):
            raise ConfigError(f"{name}: expected a finite number, got {getattr(config, name)}")
    if config.logit_std <= 0:
        raise ConfigError(f"logit_std: expected more than 0, got {config.logit_std}")
    if not -1 <= config.mode_scale <= 2 / (math.pi - 2):
        raise ConfigError(
            f"mode_scale: expected -1 to {2 / (math.pi - 2):.2f} (other values give no probability density), got "
            f"{config.mode_scale}"
        )
    if config.shift != "auto" and not 0 < config.shift < math.inf:
        raise ConfigError(f"shift: expected a number above 0, or auto, got {config.shift}")
    check_frames(config.num_frames)
    if config.num_frames * config.height * config.width > _MOST_PIXELS:
        raise ConfigError(
            f"num_frames × height × width = {config.num_frames * config.height * config.width:,} pixels per sample; "
            f"expected at most {_MOST_PIXELS:,}"
        )
    if config.lora_alpha is not None and not 0 < config.lora_alpha < math.inf:
        raise ConfigError(f"lora_alpha: expected a number above 0, got {config.lora_alpha}")
    if config.adapter != "lora" and not (config.lora_rank or config.lora_path):
        raise ConfigError(f"adapter {config.adapter} needs a rank; add --lora_rank 16 (0 trains all weights)")
    if config.lokr_factor != -1 and (config.adapter != "lokr" or config.lokr_factor < 2):
        raise ConfigError(
            f"lokr_factor {config.lokr_factor}: expected -1 or at least 2, with --adapter lokr; correct or remove it"
        )
    check_prompts(config, "preview_prompts")
    if not config.dataset_path:
        raise ConfigError("dataset_path is empty; expected a folder with images and videos, or shapes")
    if bool(config.height) != bool(config.width):
        raise ConfigError("height and width: set both, or neither to keep each sample's aspect ratio")
    if config.model_path and config.model_config:
        raise ConfigError("model_path and model_config exclude each other: continue a model, or train one from scratch")
    if not config.model_path and not config.model_config:
        raise ConfigError(
            "no model: pass --model_path FOLDER (a Wan model in diffusers' layout, or a hub id such as "
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers), or --model_config tiny to try it out without a download"
        )
    if config.window == "random" and not config.no_cache:
        raise ConfigError("window random: a random window cannot be cached; add --no_cache, or use head")
    if config.eval_dataset_path and config.num_eval:
        raise ConfigError("eval_dataset_path and num_eval both hold out samples; remove one of them")
    if config.lora_path and config.lora_targets:
        raise ConfigError("lora_targets: lora_path already determines the layers; remove one of them")
    if config.dataset_path == "shapes" and (config.model_config or "").lower() not in TINY_NAMES:
        raise ConfigError(
            "dataset_path shapes needs a tiny model; add --model_config tiny (or tiny-i2v), or pass a folder"
        )
    if config.dataset_path == "shapes" and config.masked_loss:
        raise ConfigError("masked_loss: the built-in shapes have no masks; pass a folder as dataset_path")
    if config.unmasked_weight and not config.masked_loss:
        raise ConfigError("unmasked_weight has no effect without masked_loss; add --masked_loss, or remove it")
