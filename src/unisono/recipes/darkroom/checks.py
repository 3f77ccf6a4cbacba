"""Settings of the recipe that no run can be made of, found before anything is collected or written."""

from __future__ import annotations

import math
import os
from typing import Any

from unisono.config.values import shown
from unisono.errors import ConfigError
from unisono.recipes.darkroom.rooms import Room

_AT_LEAST_ONE = (
    *("tf_n_embd", "tf_n_layer", "tf_n_head", "tf_n_inner", "n_stream", "train_n_stream", "history_skip"),
    *("eval_episodes", "eval_repeats", "num_validation", "n_steps", "source_batch_size", "n_epochs"),
    "compress_interval",
)
# Far beyond what makes sense, and well before numbers overflow or building the model alone takes for ever.
_AT_MOST = {
    **{"tf_n_embd": 2**16, "tf_n_layer": 1000, "tf_n_inner": 2**18, "n_transit": 2**20, "n_epochs": 10_000},
    **{"n_stream": 10**6, "total_source_timesteps": 10**9, "eval_episodes": 10**5, "eval_repeats": 10**4},
}
_MOST_WEIGHTS = 2 * 10**9
_MOST_HISTORY_BYTES = 2**35
_MOST_PLAYED = 10**8  # steps of one task: what happened in them is kept while it is played


def check_config(config: Any, room: Room, num_tasks: int) -> None:
    """Refuses numbers out of range, settings that contradict each other, and what no machine could hold."""
    context = config.compress_interval if config.use_compressed_context else config.n_transit
    name = "compress_interval" if config.use_compressed_context else "n_transit"
    least_of = {**dict.fromkeys(_AT_LEAST_ONE, 1), "eval_train_tasks": 0, "train_source_timesteps": context}
    # Less than two episodes in the context, and there is nothing to learn from.
    least_of[name] = 2 * room.horizon if name == "n_transit" else room.horizon
    if config.use_compressed_context:
        _check_regions(config, room.horizon)
    for key, least in least_of.items():
        value = getattr(config, key)
        if value is not None and value < least:
            raise ConfigError(f"{key}: expected at least {least}, got {value}")
    for key, most in _AT_MOST.items():
        value = getattr(config, key)
        if value is not None and value > most:
            raise ConfigError(f"{key}: expected at most {most}, got {value}")
    for key in ("label_smoothing", "source_noise"):
        if not 0 <= getattr(config, key) <= 1:
            raise ConfigError(f"{key}: expected from 0 to 1, got {getattr(config, key)}")
    for key in ("tf_dropout", "tf_attn_dropout"):
        if not 0 <= getattr(config, key) < 1:
            raise ConfigError(f"{key}: expected from 0 to less than 1, got {getattr(config, key)}")
    if config.source_lr is not None and not 0 < config.source_lr < math.inf:
        raise ConfigError(f"source_lr: expected a number above 0, got {config.source_lr}")
    if not -(2**63) <= config.alg_seed < 2**63:
        raise ConfigError(f"alg_seed: expected a 64-bit number, got {config.alg_seed}")
    if not _can_be_a_path(config.traj_dir or ""):
        raise ConfigError(f"traj_dir: no file or folder can be called {shown(config.traj_dir)}")
    if config.tf_n_embd % config.tf_n_head:
        raise ConfigError(f"tf_n_embd {config.tf_n_embd} must be a multiple of tf_n_head {config.tf_n_head}")
    _check_histories(config, room, context, name)
    _check_sizes(config, room, num_tasks)


def _check_regions(config: Any, horizon: int) -> None:
    """Whether the context has room for both regions and the marks around the first."""
    interval = config.compress_interval
    if interval < horizon or config.n_transit >= 2 * interval + 2:
        return
    shorter = (config.n_transit - 2) // 2
    raise ConfigError(
        f"n_transit {config.n_transit}: two regions of compress_interval {interval} and the 2 marks around the first "
        f"need {2 * interval + 2} tokens; use --n_transit {2 * interval + 2}"
        + (f" or --compress_interval {shorter}" if shorter >= horizon else "")
    )


def _can_be_a_path(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _check_histories(config: Any, room: Room, context: int, name: str) -> None:
    """Whether there will be histories long enough."""
    lived = config.total_source_timesteps // config.n_stream
    if lived < context:
        raise ConfigError(
            f"total_source_timesteps {config.total_source_timesteps} / n_stream {config.n_stream} = {lived} steps per "
            f"learner, fewer than a context of {context}; use at least {context * config.n_stream}"
        )
    episodes = min(config.train_source_timesteps, lived) // room.horizon
    left = -(-episodes // config.history_skip) * room.horizon
    if left < context:
        raise ConfigError(
            f"{name} {context}: of {episodes} whole episodes, history_skip {config.history_skip} leaves {left} steps; "
            "use a shorter context or longer histories"
        )
    if config.source == "ppo" and config.n_steps > lived:
        raise ConfigError(f"n_steps {config.n_steps}: a rollout does not fit into a history of {lived} steps")


def _check_sizes(config: Any, room: Room, num_tasks: int) -> None:
    """Whether what each setting allows is still possible together."""
    width = config.tf_n_embd
    weights = width * (config.n_transit + config.tf_n_layer * (4 * width + 2 * config.tf_n_inner))
    if weights > _MOST_WEIGHTS:
        raise ConfigError(
            f"tf_n_embd {width}, tf_n_layer {config.tf_n_layer} and tf_n_inner {config.tf_n_inner} make a model of "
            f"{weights:,} weights; expected at most {_MOST_WEIGHTS:,}"
        )
    size = 3 * num_tasks * config.total_source_timesteps  # a byte each for cell, action and reward
    if size > _MOST_HISTORY_BYTES:
        raise ConfigError(
            f"total_source_timesteps {config.total_source_timesteps} for each of {num_tasks} tasks are "
            f"{size / 2**30:,.0f} GiB of histories; expected at most {_MOST_HISTORY_BYTES // 2**30}"
        )
    played = config.eval_episodes * config.eval_repeats * room.horizon
    if played > _MOST_PLAYED:
        raise ConfigError(
            f"eval_episodes {config.eval_episodes} x eval_repeats {config.eval_repeats} are {played:,} steps of each "
            f"task in every evaluation; expected at most {_MOST_PLAYED:,}"
        )
