"""Declares a group of weights that is trained in turn with others (a generator and its critic)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_type_hints

from unisono.errors import RecipeError
from unisono.settings import EmaSettings, OptimSettings

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_RESERVED = {"eval", "grad_norm"}  # prefixes of other metrics
_OPTIM = (
    *("optimizer", "learning_rate", "weight_decay", "beta1", "beta2", "epsilon", "grad_clip"),
    *("lr_schedule", "warmup_steps", "min_lr_ratio", "wsd_decay_ratio"),
)
_SCHEDULES = get_args(get_type_hints(OptimSettings)["lr_schedule"])
MOST_STEPS = 10**6
"""The largest number of steps in a row of one group."""


@dataclass(frozen=True)
class Group:
    """Weights that are trained together, in turn with other groups. A field that is None follows the run's settings.

    `Group("critic", weights="critic.", steps=5)` trains for 5 steps the weights whose names begin with "critic.", then
    it is the next group's turn. Each step trains one group on one global batch.
    """

    name: str
    """Identifies the group: `Recipe.group`, metrics such as `critic/loss`."""
    weights: str | Sequence[str] | Callable[[str], bool]
    """The weights: a prefix of their names, several prefixes, or a function that accepts or rejects a name."""
    steps: int = 1
    """Number of steps in a row that train this group."""
    optimizer: str | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    epsilon: float | None = None
    grad_clip: float | None = None
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] | None = None
    warmup_steps: int | None = None
    """Schedules count the group's own steps."""
    min_lr_ratio: float | None = None
    wsd_decay_ratio: float | None = None
    ema_decay: float | None = None

    def holds(self, name: str) -> bool:
        """Whether the weight with this name belongs to the group."""
        if callable(self.weights):
            return bool(self.weights(name))
        return name.startswith(self.weights if isinstance(self.weights, str) else tuple(self.weights))

    def optim(self, settings: OptimSettings) -> OptimSettings:
        """Returns the optimizer settings of this group, in a run with these settings."""
        return replace(settings, **self._own(_OPTIM))

    def ema(self, settings: EmaSettings) -> EmaSettings:
        """Returns the settings of this group's moving average, in a run with these settings."""
        return replace(settings, **self._own(("ema_decay",)))

    def _own(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def check_groups(groups: Any) -> Sequence[Group]:
    """Checks the result of Recipe.groups(), without the model; raises RecipeError if it cannot be used."""
    if not isinstance(groups, list | tuple) or not all(isinstance(group, Group) for group in groups):
        raise RecipeError(f"groups() returned {_kind_of(groups)}; expected a list of unisono.Group")
    for group in groups:
        if not (isinstance(group.name, str) and _NAME.fullmatch(group.name)) or group.name in _RESERVED:
            raise RecipeError(
                f"groups(): {group.name!r} cannot be the name of a group; use letters, digits, _ and - (not "
                f"{' or '.join(sorted(_RESERVED))})"
            )
        if type(group.steps) is not int or not 1 <= group.steps <= MOST_STEPS:
            raise RecipeError(
                f"groups(): steps of {group.name} must be a number from 1 to {MOST_STEPS:,}, not {group.steps!r}"
            )
        prefixes = [group.weights] if isinstance(group.weights, str) else group.weights
        if not callable(prefixes) and not (
            isinstance(prefixes, Sequence) and all(isinstance(each, str) for each in prefixes)
        ):
            raise RecipeError(f"groups(): weights of {group.name} must be prefixes of names, or a function of a name")
        for name in (*_OPTIM, "ema_decay"):
            value, is_text = getattr(group, name), name in ("optimizer", "lr_schedule")
            is_number = (
                type(value) in (int, float) and math.isfinite(value) and (name != "warmup_steps" or value == int(value))
            )
            if value is not None and not (isinstance(value, str) if is_text else is_number):
                raise RecipeError(f"groups(): {name} of {group.name} cannot be {value!r}")
        if group.lr_schedule not in (None, *_SCHEDULES):
            got = f"not {group.lr_schedule!r}"
            raise RecipeError(f"groups(): lr_schedule of {group.name} must be one of {', '.join(_SCHEDULES)}, {got}")
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        raise RecipeError(f"groups(): two groups are called {max(names, key=names.count)}; use distinct names")
    return groups


def weights_of(groups: Sequence[Group], names: Sequence[str]) -> list[list[str]]:
    """Returns the names of each group's trainable weights; raises RecipeError for one in no or several groups."""
    held: list[list[str]] = [[] for _ in groups]
    for name in names:
        numbers = [number for number, group in enumerate(groups) if group.holds(name)]
        if len(numbers) > 1:
            first, second = (groups[number].name for number in numbers[:2])
            raise RecipeError(f"groups(): {name} is in {first} and in {second}; every weight belongs to one group")
        if not numbers:
            raise RecipeError(
                f"groups(): the trainable weight {name} is in no group; add it to one, or freeze it in model() "
                "(requires_grad_(False))"
            )
        held[numbers[0]].append(name)
    for group, weights in zip(groups, held, strict=True):
        if not weights:
            raise RecipeError(
                f"groups(): {group.name} has no weights: no trainable weight of model() has a name that it accepts "
                f"({_accepts(group)}); the first trainable weight is {names[0]}"
            )
    return held


def _accepts(group: Group) -> str:
    if callable(group.weights):
        return "by its function"
    prefixes = [group.weights] if isinstance(group.weights, str) else group.weights
    return "beginning with " + " or ".join(map(repr, prefixes)) if prefixes else "no prefix"


def _kind_of(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a list with {next(type(each).__name__ for each in value if not isinstance(each, Group))}"
    return type(value).__name__
