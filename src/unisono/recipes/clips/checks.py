"""Validates the settings of `clips` before anything is read or written."""

from __future__ import annotations

import math
from typing import Any

from unisono.errors import ConfigError
from unisono.recipes.clips.settings import INPUT_KINDS
from unisono.recipes.common.checks import check_paths, check_range

_LEAST = {
    **{"num_videos": 4, "extract_workers": 1, "frames_per_clip": 1, "frame_size": 16, "width": 8, "layers": 1},
    **{"heads": 1, "window": 2, "ranking_weight": 0, "positive_from": 0},
}
_MOST = {
    **{"frame_size": 1024, "frames_per_clip": 1000, "width": 16_384, "layers": 1000, "window": 100_000},
    "positive_from": 1,
}


def check_config(config: Any) -> None:
    """Raises ConfigError if a value is out of range or if settings contradict each other."""
    check_paths(config, ("data_path", "media_path", "eval_data_path", "cache_dir"))
    if not config.data_path:
        raise ConfigError(
            "data_path is missing; pass --data_path FOLDER (videos and labels.csv with video,start,end,score), or "
            "--data_path mirror to train on the built-in dataset"
        )
    check_range(config, _LEAST, _MOST)
    for name in ("clip_seconds", "highest_score", "feature_seconds"):
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}: expected a number above 0, got {value}")
    if config.width % config.heads:
        raise ConfigError(f"width {config.width} is not divisible by heads {config.heads}; use a multiple")
    if not 0 <= config.dropout < 1:
        raise ConfigError(f"dropout: expected at least 0 and less than 1, got {config.dropout}")
    if config.num_eval is not None and config.num_eval < 0:
        raise ConfigError(f"num_eval: expected at least 0, got {config.num_eval}")
    if config.eval_data_path and config.num_eval:
        raise ConfigError("eval_data_path and num_eval both select held-out videos; pass only one of them")
    unknown = sorted(set(selected_inputs(config)) - set(INPUT_KINDS))
    if unknown:
        raise ConfigError(f"use: unknown input {unknown[0]!r}; choose from {', '.join(INPUT_KINDS)}")


def selected_inputs(config: Any) -> list[str]:
    """Returns the names in `use`; empty if the recipe chooses the inputs."""
    return [name.strip() for name in config.use.split(",") if name.strip()]
