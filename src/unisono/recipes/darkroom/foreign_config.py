"""Translates config files from other implementations.

These implementations describe the environment, the source learner and the model in three YAML files, which are merged
into one flat mapping. A key either has the same effect here, or raises an error that states the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.config.values import Mismatch, coerce, jsonable, shown
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
"""Alternative names of settings."""

_SOURCES = {
    "ppo": "ppo",
    "explorer": "explorer",
    "rmax": "explorer",
    "q": "q_learning",
    "q_learning": "q_learning",
    "noise": "noise",
    "eps": "noise",
}
"""The values of `alg`, with the source learner that each value selects."""

_CONSTANTS: Mapping[str, tuple[Any, Any, str]] = {
    "model": (str, "AD", "this recipe trains AD"),
    "dynamics": (bool, False, "the model predicts only actions, not rewards or next states"),
    "flash_attn": (bool, True, "attention always uses torch's fused kernels, without a mask"),
    "dim_states": (int, 2, "a state is a cell, x and y"),
    "dim_actions": (int, 1, "an action is one number"),
    "num_actions": (int, 5, "the environments have five actions: four moves and staying in place"),
    "policy": (str, "MlpPolicy", "the source learner ppo uses a small MLP"),
    "tensorboard_log": (str | None, None, "only the run writes TensorBoard files, not the source learners"),
}
"""Keys with a single allowed value: type, value, and the reason."""

_WITHOUT_EFFECT: Mapping[str, str] = {
    "n_process": "learners run as a batch on the run's own ranks, not in worker processes",
    "device": "histories are collected on the run's devices; --gpus 0 uses the CPU",
    "on_policy_threshold": "histories are not filtered by return",
    "compression_window": "histories are not thinned by a window; history_skip uses every n-th episode",
    "dynamics_strength": "there is no dynamics loss to weight",
}
"""Keys that would have no effect, and the reason."""


FILE_KEYS: Mapping[str, Any] = {
    "alg": str,
    "max_reward": float,
    **{key: kind for key, (kind, _, _) in _CONSTANTS.items()},
    **dict.fromkeys(_WITHOUT_EFFECT, str),
}
"""Keys that are not settings, with their types."""


def translate(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the settings under unisono's names; `where` names the file that they come from."""
    values = dict(values)
    for key, reason in _WITHOUT_EFFECT.items():
        if key in values:
            raise ConfigError(f"{key} has no effect: {reason} (from {where}); remove it")
    for key, (kind, value, reason) in _CONSTANTS.items():
        if key in values:
            _check_constant(key, values.pop(key), kind, value, reason, where)
    if "max_reward" in values:
        largest = _largest_return(values)
        reason = "it follows from the environment and its horizon"
        _check_constant("max_reward", values.pop("max_reward"), float, largest, reason, where)
    if "alg" in values:
        alg = values.pop("alg")
        source = _SOURCES.get(str(alg).lower())
        if source is None:
            raise ConfigError(f"alg: expected one of {', '.join(_SOURCES)}, got {shown(alg)} (from {where})")
        _rename(values, "alg", source, "source", where)
        if source == "ppo":
            values.setdefault("source_shared", True)  # other implementations train one shared policy per task
        # In an algorithm file, batch_size is the source learner's minibatch; the transformer's is train_batch_size.
        if "batch_size" in values:
            _rename(values, "batch_size", values.pop("batch_size"), "source_batch_size", where)
    return values


def _rename(values: dict[str, Any], key: str, value: Any, name: str, where: str) -> None:
    if name in values and str(values[name]) != str(value):
        raise ConfigError(
            f"{key} ({shown(value)}) and {name} ({shown(values[name])}) are the same setting (from {where}); "
            "remove one of them"
        )
    values[name] = value


def _check_constant(key: str, value: Any, kind: Any, constant: Any, reason: str, where: str) -> None:
    try:
        fits = coerce(kind, value) == constant
    except Mismatch:
        fits = False
    if not fits:
        raise ConfigError(f"{key}: expected {_text(constant)}, because {reason}; got {_text(value)} (from {where})")


def _text(value: Any) -> str:
    return str(jsonable(value)).lower() if value is None or isinstance(value, bool) else str(shown(value)).strip("'")


def _largest_return(values: Mapping[str, Any]) -> float:
    """Returns the largest possible return of an episode in the environment that the file describes."""
    if values.get("env") == "dark_key_to_door":
        return 2.0
    try:
        return float(coerce(int, values.get("horizon", 20))) or 20.0
    except Mismatch:
        return 20.0
