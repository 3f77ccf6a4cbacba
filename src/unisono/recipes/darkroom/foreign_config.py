"""The keys of the configuration files that people have, in our words.

Known implementations keep a room, a source learner and a model in three YAML files and merge them into one flat
mapping. Their names are taken here as they are: each does what it says, or is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.config.values import Mismatch, coerce, plain, shown
from unisono.errors import ConfigError

ALIASES: Mapping[str, str] = {
    "train_batch_size": "batch_size",
    "test_batch_size": "eval_batch_size",
    "train_timesteps": "max_steps",
    "num_warmup_steps": "warmup_steps",
    "lr": "learning_rate",
    "summary_interval": "log_every",
    "eval_interval": "eval_every",
    "ckpt_interval": "save_every",
    "gen_interval": "preview_every",
}
"""Other names of settings."""

_SOURCES = {
    "ppo": "ppo",
    "explorer": "explorer",
    "rmax": "explorer",
    "q": "q_learning",
    "q_learning": "q_learning",
    "noise": "noise",
    "eps": "noise",
}
"""What `alg` can be -> the source learner."""

_ONLY: Mapping[str, tuple[Any, Any, str]] = {
    "model": (str, "AD", "this recipe trains AD"),
    "dynamics": (bool, False, "the model predicts actions, neither rewards nor next states"),
    "flash_attn": (bool, True, "attention always runs in torch's fused kernels, which need no mask"),
    "dim_states": (int, 2, "a state is a cell, x and y"),
    "dim_actions": (int, 1, "an action is one number"),
    "num_actions": (int, 5, "the rooms have four moves and staying"),
    "policy": (str, "MlpPolicy", "the source learner ppo has a small MLP"),
    "tensorboard_log": (
        str | None,
        None,
        "source learners write no TensorBoard files, the run does",
    ),
}
"""Keys with one value that is what happens here anyway: type, value, and the reason why there is no other."""

_REFUSED: Mapping[str, str] = {
    "n_process": "learners live in batches, shared over the run's own ranks, not in worker processes",
    "device": "histories are collected on the run's own devices; --gpus 0 takes the CPU",
    "on_policy_threshold": "histories are not filtered by how good they are",
    "compression_window": "histories are not thinned out by a window; history_skip takes every n-th episode",
    "dynamics_strength": "there is no dynamics loss that it could weigh",
}
"""Keys that would do nothing here, and why."""


FILE_KEYS: Mapping[str, Any] = {
    "alg": str,
    "max_reward": float,
    **{key: kind for key, (kind, _, _) in _ONLY.items()},
    **dict.fromkeys(_REFUSED, str),
}
"""Keys that are no settings, with their types."""


def translate(values: dict[str, Any], where: str) -> dict[str, Any]:
    """The same settings under our names; `where` is the file they come from."""
    values = dict(values)
    for key, reason in _REFUSED.items():
        if key in values:
            raise ConfigError(f"{key}: {reason} (from {where}); leave it out")
    for key, (kind, only, reason) in _ONLY.items():
        if key in values:
            _must_be(key, values.pop(key), kind, only, reason, where)
    if "max_reward" in values:
        most = _largest_return(values)
        _must_be("max_reward", values.pop("max_reward"), float, most, "it follows from the room and its horizon", where)
    if "alg" in values:
        alg = values.pop("alg")
        _rename(values, "alg", _source(alg, where), "source", where)
        if values["source"] == "ppo":
            values.setdefault("source_shared", True)  # what such files mean: one policy for the streams of a task
        # In the file of an algorithm it is the minibatch of the source learner; the transformer's is train_batch_size.
        if "batch_size" in values:
            _rename(values, "batch_size", values.pop("batch_size"), "source_batch_size", where)
    return values


def _source(alg: Any, where: str) -> str:
    found = _SOURCES.get(str(alg).lower())
    if found is None:
        raise ConfigError(f"alg: there is no source learner {shown(alg)}, only {', '.join(_SOURCES)} (from {where})")
    return found


def _rename(values: dict[str, Any], key: str, value: Any, name: str, where: str) -> None:
    if name in values and str(values[name]) != str(value):
        raise ConfigError(
            f"{key} ({shown(value)}) and {name} ({shown(values[name])}) are two names of one setting (from {where}); "
            "leave one of them out"
        )
    values[name] = value


def _must_be(key: str, value: Any, kind: Any, only: Any, reason: str, where: str) -> None:
    try:
        fits = coerce(kind, value) == only
    except Mismatch:
        fits = False
    if not fits:
        raise ConfigError(f"{key}: only {_word(only)} is possible, {reason}; got {_word(value)} (from {where})")


def _word(value: Any) -> str:
    return str(plain(value)).lower() if value is None or isinstance(value, bool) else str(shown(value)).strip("'")


def _largest_return(values: Mapping[str, Any]) -> float:
    """Of one episode, as far as this file says in which room."""
    if values.get("env") == "dark_key_to_door":
        return 2.0
    try:
        return float(coerce(int, values.get("horizon", 20))) or 20.0
    except Mismatch:
        return 20.0
