"""Rejects settings that cannot work, before anything is read or written."""

from __future__ import annotations

import math

from unisono.errors import ConfigError
from unisono.recipes.common.checks import check_paths, check_range
from unisono.recipes.seo.settings import FOR, Config

_AT_LEAST: dict[str, float] = {"max_length": 8, "query_length": 4, "length_groups": 1, "num_negatives": 0, "rerank": 1}
_AT_LEAST |= {"target_length": 4, "scale": 1e-3, "lora_rank": 0, "lora_dropout": 0.0}
_AT_MOST: dict[str, float] = {"max_length": 2**17, "query_length": 2**17, "length_groups": 64, "num_negatives": 1000}
_AT_MOST |= {"rerank": 100}  # largest number of BM25 results stored per query
_AT_MOST |= {"target_length": 1024, "scale": 1e4, "lora_rank": 4096, "lora_dropout": 0.99}


def check_kind(config: Config) -> None:
    """Rejects settings that affect only other tasks. Separate from check_config, so that old runs can be exported."""
    for name, kinds in FOR.items():
        if config.kind not in kinds and getattr(config, name) != getattr(Config, name):
            kind = kinds[0] if len(kinds) == 1 else "task rank"
            raise ConfigError(f"{name} only applies to {kind}, but this run uses {config.kind}; remove it")


def check_config(config: Config) -> None:
    """Rejects missing data and values out of range."""
    if not config.data_path:
        content = {"rank": "queries and pages", "score": "pages and labels", "snippet": "pages and titles"}[config.task]
        builtin = "" if config.task == "score" else ", or `debian`"
        raise ConfigError(f"data_path: expected data, for instance a .csv of {content}{builtin}")
    check_paths(config, ("data_path", "eval_data_path", "cache_dir", "model_name"))
    check_range(config, _AT_LEAST, _AT_MOST)
    if config.lora_alpha is not None and not 0 < config.lora_alpha < math.inf:
        raise ConfigError(f"lora_alpha: expected a number above 0, got {config.lora_alpha}")
    for name in ("num_eval", "num_candidates"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}: expected at least 1, got {value}")
