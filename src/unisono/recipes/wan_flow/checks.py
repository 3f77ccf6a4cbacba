"""Settings of the recipe that no run can be made of, found before anything is loaded or written."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from unisono.config.values import shown
from unisono.errors import ConfigError

_SHARES = ("caption_dropout", "first_frame")
_AT_LEAST = {"num_eval": 0, "height": 0, "width": 0, "max_pixels": 0, "lora_rank": 0, "num_previews": 0}
_AT_LEAST |= {"eval_levels": 1, "preview_steps": 1}
_AT_MOST = {"num_frames": 100_001, "eval_levels": 1000, "preview_steps": 1000, "num_previews": 10_000}
_AT_MOST |= {"height": 16_384, "width": 16_384, "fps": 1000, "lora_rank": 16_384, "num_shapes": 1_000_000}
_MOST_PIXELS = 2**30  # of all frames of a sample, which are in memory together
_PATHS = ("model_path", "model_config", "parts_path", "dataset_path", "eval_dataset_path", "cache_dir", "lora_path")
_FINITE = ("fps", "logit_mean", "logit_std", "mode_scale", "guidance")


def check_config(config: Any) -> None:
    """Refuses numbers out of range and settings that contradict each other."""
    for name in _PATHS:
        if not _can_be_a_path(getattr(config, name) or ""):
            raise ConfigError(f"{name}: no file or folder can be called {shown(getattr(config, name))}")
    for name, least in _AT_LEAST.items():
        if getattr(config, name) < least:
            raise ConfigError(f"{name}: expected at least {least}, got {getattr(config, name)}")
    for name, most in _AT_MOST.items():
        if getattr(config, name) > most:
            raise ConfigError(f"{name}: expected at most {most}, got {getattr(config, name)}")
    for name in _SHARES:
        if not 0 <= getattr(config, name) <= 1:
            raise ConfigError(f"{name}: expected a share from 0 to 1, got {getattr(config, name)}")
    for name in _FINITE:
        if not math.isfinite(getattr(config, name)):
            raise ConfigError(f"{name}: expected a finite number, got {getattr(config, name)}")
    if config.fps < 0:
        raise ConfigError(f"fps: expected at least 0, got {config.fps}")
    if config.logit_std <= 0:
        raise ConfigError(f"logit_std: expected more than 0, got {config.logit_std}")
    if not -1 <= config.mode_scale <= 2 / (math.pi - 2):
        raise ConfigError(
            f"mode_scale: expected -1 to {2 / (math.pi - 2):.2f}, where it still is a density, got {config.mode_scale}"
        )
    if config.shift != "auto" and not 0 < config.shift < math.inf:
        raise ConfigError(f"shift: expected a number above 0, or auto, got {config.shift}")
    if config.num_frames < 1 or config.num_frames % 4 != 1:
        below = max(1, (config.num_frames - 1) // 4 * 4 + 1)
        raise ConfigError(f"num_frames: Wan takes 1, 5, 9, …; got {config.num_frames}, use {below} or {below + 4}")
    if config.num_frames * config.height * config.width > _MOST_PIXELS:
        raise ConfigError(
            f"num_frames × height × width = {config.num_frames * config.height * config.width:,} pixels of a sample; "
            f"expected at most {_MOST_PIXELS:,}"
        )
    if config.lora_alpha is not None and not 0 < config.lora_alpha < math.inf:
        raise ConfigError(f"lora_alpha: expected a number above 0, got {config.lora_alpha}")
    if not _is_text(config.preview_prompts):
        raise ConfigError(f"preview_prompts: {shown(config.preview_prompts)} is not proper Unicode")
    prompts = config.preview_prompts
    if prompts.endswith(".txt") and not os.path.isfile(os.path.expanduser(prompts)):
        raise ConfigError(f"preview_prompts {shown(prompts)}: there is no such file; expected one caption in each line")
    if not config.dataset_path:
        raise ConfigError("dataset_path: expected a folder with pictures and films, or shapes; it is empty")
    if bool(config.height) != bool(config.width):
        raise ConfigError("height and width: give both, or neither to keep each sample's proportions")
    if config.model_path and config.model_config:
        raise ConfigError("model_path and model_config: go on from a model, or train one from nothing; leave one out")
    if not config.model_path and not config.model_config:
        raise ConfigError(
            "no model: give --model_path FOLDER (a Wan model in diffusers' layout, or a hub id such as "
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers), or --model_config tiny to try it out with nothing downloaded"
        )
    if config.window == "random" and not config.no_cache:
        raise ConfigError("window random: a window that begins anywhere cannot be cached; add --no_cache, or use head")
    if config.eval_dataset_path and config.num_eval:
        raise ConfigError("eval_dataset_path and num_eval both hold out samples; leave one of them out")
    if config.lora_path and not config.lora_rank:
        raise ConfigError("lora_path needs lora_rank: the rank to go on with")
    if config.dataset_path == "shapes" and (config.model_config or "").lower() != "tiny":
        raise ConfigError("dataset_path shapes is for the tiny model; add --model_config tiny, or give a folder")


def check_positions(shapes: Iterable[tuple[int, ...]], transformer: Mapping[str, Any], pixels: int) -> None:
    """Refuses samples that reach beyond the positions that the transformer tells apart."""
    most, patch = int(transformer.get("rope_max_seq_len") or 1024), transformer["patch_size"]
    for shape in shapes:
        if any(side // size > most for side, size in zip(shape[1:], patch, strict=True)):
            raise ConfigError(
                f"a sample of {shape[1]} latent frames, {shape[2] * pixels} × {shape[3] * pixels} pixels, is more than "
                f"this model has positions for ({most} along each side, of {patch[1] * pixels} pixels each); use a "
                "smaller max_pixels, or height and width"
            )


def _can_be_a_path(text: str) -> bool:
    place = os.path.expanduser(text)
    if place == text and text.startswith("~"):  # the home of nobody
        return False
    try:
        os.stat(place)
    except ValueError:  # a zero, or half a character
        return False
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG and not any(sign < " " for sign in text)
    return True


def _is_text(text: str) -> bool:
    try:
        return "\0" not in text and bool(text.encode() or True)
    except UnicodeEncodeError:
        return False
