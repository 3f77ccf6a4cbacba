"""Rejects settings that cannot work, before anything is collected or written."""

from __future__ import annotations

import math
from typing import Any

from unisono.errors import ConfigError
from unisono.recipes.common.checks import check_paths, check_range
from unisono.recipes.darkroom.rooms import Room

_AT_LEAST_ONE = (
    *("tf_n_embd", "tf_n_layer", "tf_n_head", "tf_n_inner", "n_stream", "train_n_stream", "history_skip"),
    *("eval_episodes", "eval_repeats", "num_validation", "n_steps", "source_batch_size", "n_epochs"),
    "compress_interval",
)
# Limits that are far above sensible values, but below values that overflow or take forever to build.
_AT_MOST = {
    **{"tf_n_embd": 2**16, "tf_n_layer": 1000, "tf_n_inner": 2**18, "n_transit": 2**20, "n_epochs": 10_000},
    **{"n_stream": 10**6, "total_source_timesteps": 10**9, "eval_episodes": 10**5, "eval_repeats": 10**4},
}
_MAX_PARAMETERS = 2 * 10**9
_MAX_HISTORY_BYTES = 2**35
_MAX_EVAL_STEPS = 10**8  # limit per task, because an evaluation holds all steps in memory


def check_config(config: Any, room: Room, num_tasks: int) -> None:
    """Rejects numbers out of range, contradictory settings, and sizes that do not fit into any machine's memory."""
    name = "compress_interval" if config.use_compressed_context else "n_transit"
    context = getattr(config, name)
    if config.use_compressed_context:
        _check_regions(config, room.horizon)
    # A context of fewer than two episodes contains no earlier episode to learn from.
    shortest = {name: room.horizon if config.use_compressed_context else 2 * room.horizon}
    least = {**dict.fromkeys(_AT_LEAST_ONE, 1), "eval_train_tasks": 0, "train_source_timesteps": context, **shortest}
    check_range(config, least, _AT_MOST)
    check_range(config, {"label_smoothing": 0, "source_noise": 0}, {"label_smoothing": 1, "source_noise": 1})
    for key in ("tf_dropout", "tf_attn_dropout"):
        if not 0 <= getattr(config, key) < 1:
            raise ConfigError(f"{key}: expected at least 0 and less than 1, got {getattr(config, key)}")
    if config.source_lr is not None and not 0 < config.source_lr < math.inf:
        raise ConfigError(f"source_lr: expected a number above 0, got {config.source_lr}")
    if not -(2**63) <= config.alg_seed < 2**63:
        raise ConfigError(f"alg_seed: expected a 64-bit integer, got {config.alg_seed}")
    check_paths(config, ["traj_dir"])
    if config.tf_n_embd % config.tf_n_head:
        raise ConfigError(f"tf_n_embd {config.tf_n_embd} must be a multiple of tf_n_head {config.tf_n_head}")
    _check_histories(config, room, context, name)
    _check_sizes(config, room, num_tasks)


def _check_regions(config: Any, horizon: int) -> None:
    """Checks that both regions and the two separators fit into the context."""
    interval = config.compress_interval
    if interval < horizon or config.n_transit >= 2 * interval + 2:
        return
    shorter = (config.n_transit - 2) // 2
    raise ConfigError(
        f"n_transit {config.n_transit}: two regions of compress_interval {interval} and two separators need "
        f"{2 * interval + 2} tokens; use --n_transit {2 * interval + 2}"
        + (f" or --compress_interval {shorter}" if shorter >= horizon else "")
    )


def _check_histories(config: Any, room: Room, context: int, name: str) -> None:
    """Checks that the histories will be long enough."""
    steps = config.total_source_timesteps // config.n_stream
    if steps < context:
        raise ConfigError(
            f"total_source_timesteps {config.total_source_timesteps} / n_stream {config.n_stream} = {steps} steps per "
            f"learner, less than a context of {context}; use at least {context * config.n_stream}"
        )
    episodes = min(config.train_source_timesteps, steps) // room.horizon
    usable_steps = -(-episodes // config.history_skip) * room.horizon
    if usable_steps < context:
        raise ConfigError(
            f"{name} {context}: history_skip {config.history_skip} leaves {usable_steps} steps of {episodes} episodes; "
            "use a shorter context or longer histories"
        )
    if config.source == "ppo" and config.n_steps > steps:
        raise ConfigError(f"n_steps {config.n_steps}: a rollout does not fit into a history of {steps} steps")


def _check_sizes(config: Any, room: Room, num_tasks: int) -> None:
    """Checks the sizes that several settings determine together."""
    width = config.tf_n_embd
    parameters = width * (config.n_transit + config.tf_n_layer * (4 * width + 2 * config.tf_n_inner))
    if parameters > _MAX_PARAMETERS:
        raise ConfigError(
            f"tf_n_embd {width}, tf_n_layer {config.tf_n_layer} and tf_n_inner {config.tf_n_inner} make a model of "
            f"{parameters:,} parameters; expected at most {_MAX_PARAMETERS:,}"
        )
    size = 3 * num_tasks * config.total_source_timesteps  # one byte each for cell, action and reward
    if size > _MAX_HISTORY_BYTES:
        raise ConfigError(
            f"total_source_timesteps {config.total_source_timesteps} for each of {num_tasks} tasks need "
            f"{size / 2**30:,.0f} GiB for histories; the maximum is {_MAX_HISTORY_BYTES // 2**30} GiB"
        )
    eval_steps = config.eval_episodes * config.eval_repeats * room.horizon
    if eval_steps > _MAX_EVAL_STEPS:
        raise ConfigError(
            f"eval_episodes {config.eval_episodes} x eval_repeats {config.eval_repeats} are {eval_steps:,} steps of "
            f"each task per evaluation; expected at most {_MAX_EVAL_STEPS:,}"
        )
