"""The learning rate of each optimizer step, by the names people know.

All of them count optimizer steps, whatever the number of GPUs; what goes by epochs knows how many steps an epoch has.
So the rate is a function of the step alone, and a run that goes on needs nothing but its number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from unisono.config.values import did_you_mean
from unisono.engine.step.learning_rate import learning_rate_factor
from unisono.errors import ConfigError
from unisono.recipes.seo.front.config import SCHEDULES, SEOConfig
from unisono.settings import OptimSettings

_KNOWN: dict[str, dict[str, float]] = {
    "cosine": {"T_max": 0, "eta_min": 0.0},
    "linear": {"eta_min": 0.0},
    "constant": {},
    "exponential": {"gamma": 0.95},
    "step": {"step_size": 30, "gamma": 0.1},
    "plateau": {"factor": 0.5, "patience": 3, "min_lr": 0.0},
}
"""What each can be told, and what holds otherwise (T_max 0: to the end of the run)."""


def make_schedule(config: SEOConfig, steps_per_epoch: int, epochs: int) -> Callable[[Optimizer], LRScheduler]:
    """What makes the scheduler of a run of so many epochs."""
    told = told_by(config)
    if config.lr_scheduler == "plateau":
        return lambda optimizer: ReduceLROnPlateau(
            optimizer, factor=told["factor"], patience=int(told["patience"]), min_lr=told["min_lr"]
        )
    factor = _Factor(config, told, steps_per_epoch, steps_per_epoch * epochs)
    return lambda optimizer: LambdaLR(optimizer, factor)


def told_by(config: SEOConfig) -> dict[str, float]:
    """The numbers of the schedule that is chosen: as the config says, else the usual ones."""
    name, given = config.lr_scheduler, config.lr_scheduler_params
    if not isinstance(given, Mapping):
        raise ConfigError(f"lr_scheduler_params: expected a dict, got {type(given).__name__}")
    if given and all(isinstance(value, Mapping) for value in given.values()):
        for other in given:
            if other not in SCHEDULES:
                raise ConfigError(f"lr_scheduler_params: unknown {other!r}{did_you_mean(str(other), list(SCHEDULES))}")
        given = given.get(name, {})
    found = dict(_KNOWN[name])
    for key, value in given.items():
        if key not in found:
            can = ", ".join(found) or "nothing to be told"
            raise ConfigError(f"lr_scheduler_params: {name} has no {key!r}; it has {can}{_instead(key)}")
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"lr_scheduler_params: {key}: expected a number of at least 0, got {value!r}")
        found[key] = value
    if name == "step" and found["step_size"] < 1:
        raise ConfigError(f"lr_scheduler_params: step_size: expected at least 1 epoch, got {found['step_size']!r}")
    return found


def _instead(key: Any) -> str:
    known = {"num_warmup_steps": "; warmup_steps is a field of its own", "mode": "; early_stopping_mode says it"}
    return known.get(str(key), "")


class _Factor:
    """The part of the peak learning rate that a step (from 0) uses.

    An object, because a checkpoint of LambdaLR has None in the place of a plain function.
    """

    def __init__(self, config: SEOConfig, told: Mapping[str, float], steps_per_epoch: int, steps: int) -> None:
        self.name, self.told, self.steps_per_epoch = config.lr_scheduler, told, steps_per_epoch
        self.total = int(told.get("T_max", 0)) or steps
        self.smooth = OptimSettings(
            lr_schedule="cosine" if self.name == "cosine" else "linear" if self.name == "linear" else "constant",
            warmup_steps=config.warmup_steps,
            min_lr_ratio=min(1.0, told.get("eta_min", 0.0) / config.learning_rate),
        )

    def __call__(self, step: int) -> float:
        part, epoch = learning_rate_factor(step, self.total, self.smooth), step // self.steps_per_epoch
        if self.name == "exponential":
            part *= self.told["gamma"] ** epoch
        elif self.name == "step":
            part *= self.told["gamma"] ** (epoch // int(self.told["step_size"]))
        return part
