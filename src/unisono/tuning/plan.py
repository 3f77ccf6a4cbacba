"""Defines what a study searches over, and writes study.json, by which a later command recognises the same study."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from unisono.atomic_files import write_atomically
from unisono.config.fields import Field, with_aliases
from unisono.config.flags import SIMILAR, parse_flags
from unisono.config.foreign import foreign_answer
from unisono.config.resolve import Resolved, with_recipe_defaults
from unisono.config.values import did_you_mean, jsonable, shown
from unisono.engine.checks import check_run
from unisono.engine.recipe import Recipe
from unisono.engine.start.registry import recipes_with
from unisono.engine.start.settings_source import SettingsSource
from unisono.errors import ConfigError, UserError
from unisono.plain_files import read_json
from unisono.settings import Settings
from unisono.tuning.space import Space, read_space

STUDY = "study.json"
"""The file in a study's folder that describes the study."""

SETTINGS = "settings.json"
"""The file in a study's folder with the settings that a Python caller passed."""

PRUNERS = ("none", "median", "hyperband")
SAMPLERS = ("tpe", "random")
DIRECTIONS = ("minimize", "maximize")

_PLACEMENT = ("output_dir", "resume", "gpus", "nproc", "max_ranks_per_core", "min_memory_gb", "max_restarts")
"""Settings that may change when a study is continued."""

_KINDS = {"recipe": str, "objective": str, "direction": str, "search": dict, "trials": int, "command": list}
"""Fields of study.json, and their types."""


@dataclass(frozen=True)
class StudyOptions:
    """How a study searches, apart from its search space."""

    trials: int = 20
    """Number of finished trials after which the study ends, including pruned and failed trials."""
    objective: str | None = None
    """Evaluation metric to optimize. Default: best_metric if it is set, otherwise eval/loss."""
    direction: Literal["minimize", "maximize"] | None = None
    """Whether a smaller or a larger objective is better. Default: minimize, or best_mode if best_metric is set."""
    pruner: Literal["none", "median", "hyperband"] = "median"
    """How bad trials stop early. median: if earlier trials were better at the same step. hyperband: by Hyperband."""
    pruner_startup_trials: int = 5
    """median: number of completed trials before the first one is pruned."""
    sampler: Literal["tpe", "random"] = "tpe"
    """How values are chosen: tpe learns from finished trials, random does not."""
    parallel: int = 1
    """Number of trials that run at the same time."""

    def check(self) -> None:
        """Raises ConfigError for a value that cannot work."""
        for name, choices in (("direction", (None, *DIRECTIONS)), ("pruner", PRUNERS), ("sampler", SAMPLERS)):
            value = getattr(self, name)
            if value not in choices:
                names = [each for each in choices if each]
                raise ConfigError(f"{name}: expected one of {', '.join(names)}, got {shown(value)}")
        for name, least in (("trials", 1), ("parallel", 1), ("pruner_startup_trials", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name}: expected a whole number of at least {least}, got {shown(value)}")


@dataclass(frozen=True)
class StudyPlan:
    """A study: the recipe, its settings, the search space, and the options of the search."""

    recipe: str
    """Reference to the recipe, as the user wrote it."""
    name: str
    spaces: tuple[Space, ...]
    options: StudyOptions
    objective: str
    direction: str
    base: Resolved = field(repr=False)
    """The settings of the trials; a searched setting has the first value of its space."""
    source: SettingsSource

    @property
    def seed(self) -> int:
        """The seed of the trials; the sampler's random numbers also depend on it."""
        return int(self.base.values["seed"])

    @property
    def max_steps(self) -> int | None:
        """Number of steps of a trial, if a setting defines it."""
        return self.base.values["max_steps"] if self.base.values["num_epochs"] is None else None

    def identity(self) -> dict[str, Any]:
        """Returns everything that must not change when a study is continued."""
        searched = {space.name for space in self.spaces}
        settings = {
            name: jsonable(value)
            for name, value in self.base.values.items()
            if name not in _PLACEMENT and name not in searched
        }
        return {
            "recipe": self.name,
            "search": {space.name: space.text for space in self.spaces},
            "objective": self.objective,
            "direction": self.direction,
            "pruner": self.options.pruner,
            "pruner_startup_trials": self.options.pruner_startup_trials,
            "sampler": self.options.sampler,
            "settings": settings,
        }

    def write(self, folder: Path) -> None:
        """Writes study.json, or updates the number of trials of an existing one."""
        before = read_study(folder) or {}
        record = {
            "kind": "study",
            "created": before.get("created", datetime.now(UTC).isoformat(timespec="milliseconds")),
            **self.identity(),
            "trials": self.options.trials,
            "command": ["unisono", "train", self.recipe, *self.source.arguments(folder / SETTINGS)],
            "versions": {name: found for name in ("unisono", "optuna", "torch") if (found := _version(name))},
        }
        if self.source.overrides:
            passed = {name: jsonable(value) for name, value in self.source.overrides.items()}
            write_atomically(folder / SETTINGS, json.dumps(passed, indent=2) + "\n", durable=True, one_writer=True)
        write_atomically(folder / STUDY, json.dumps(record, indent=2) + "\n", durable=True, one_writer=True)

    def check_same(self, folder: Path) -> bool:
        """Returns whether the folder contains this study; raises ConfigError if it contains another one."""
        record = read_study(folder)
        if record is None:
            return False
        for name, value in self.identity().items():
            before = record.get(name)
            if isinstance(value, Mapping) and isinstance(before, Mapping):
                names = [each for each in {**value, **before} if value.get(each) != before.get(each)]
                if names:
                    where = f"search {names[0]}" if name == "search" else names[0]
                    _refuse(folder, where, before.get(names[0]), value.get(names[0]))
            elif before != value:
                _refuse(folder, name, before, value)
        return True


def plan_study(
    recipe_class: type[Recipe],
    recipe: str,
    search: Mapping[str, object],
    options: StudyOptions,
    source: SettingsSource,
) -> StudyPlan:
    """Checks the search space and the settings of a study, as far as possible before anything is written."""
    options.check()
    if not search:
        raise ConfigError(
            "the search space is empty; name a setting and its values, for instance "
            "--search learning_rate=log:1e-5..1e-2"
        )
    spaces = tuple(_spaces(recipe_class, search, source))
    first = {space.name: space.ends[0] for space in spaces}
    base = source.resolve(recipe_class, first)
    if base.values["nnodes"] != 1:
        raise ConfigError("nnodes: a study runs on one machine; start one study per machine, with other seeds")
    objective, direction = _objective(base, options)
    check_evaluations(base, spaces, options, objective)
    for space in spaces:  # check each end of a range and each choice, with the other settings at their first values
        for value in space.ends:
            try:
                check_run(recipe_class, source.resolve(recipe_class, {**first, space.name: value}))
            except UserError as error:
                raise ConfigError(f"search {space.name}, value {value}: {error}") from None
    return StudyPlan(recipe, recipe_class.__qualname__, spaces, options, objective, direction, base, source)


def _spaces(recipe_class: type[Recipe], search: Mapping[str, object], source: SettingsSource) -> list[Space]:
    fields = with_recipe_defaults((Settings, recipe_class.Config), recipe_class.defaults).fields
    names, aliases = with_aliases(fields, recipe_class.aliases), recipe_class.aliases
    flag_names = names | {key: Field(key, kind, None, "", "", "") for key, kind in recipe_class.file_keys.items()}
    fixed = {name for name, _ in parse_flags(source.flags, flag_names, _explain)} | set(source.overrides)
    fixed = {aliases.get(name, name) for name in fixed}
    spaces: dict[str, Space] = {}
    for name, values in search.items():
        if name not in names:
            hint = _explain(name, names, "") or did_you_mean(name, list(names), similarity=SIMILAR)
            raise ConfigError(f"search {name}: there is no such setting{hint}")
        setting = aliases.get(name, name)
        if setting in spaces:
            raise ConfigError(f"search {name}: {setting} is searched twice; remove one")
        if setting in fixed:
            raise ConfigError(f"{setting} is both set and searched; remove one of the two")
        spaces[setting] = read_space(fields[setting], values)
    return list(spaces.values())


def _objective(base: Resolved, options: StudyOptions) -> tuple[str, str]:
    best = base.values["best_metric"]
    objective = options.objective or best or "eval/loss"
    if not objective.startswith("eval/"):
        raise ConfigError(f"objective {objective}: expected a metric of the evaluation, for instance eval/loss")
    mode = "maximize" if best == objective and base.values["best_mode"] == "max" else "minimize"
    return objective, options.direction or mode


def check_evaluations(base: Resolved, spaces: Sequence[Space], options: StudyOptions, objective: str) -> None:
    """Raises ConfigError if trials would never be evaluated."""
    every = base.values["eval_every"]
    if every < 0:
        raise ConfigError(f"eval_every {every}: trials would never be evaluated, and {objective} is the objective")
    if options.pruner == "hyperband" and every == 0:
        raise ConfigError("pruner hyperband compares evaluations during training; set --eval_every")


def _explain(name: str, known: Mapping[str, Field], prefix: str) -> str:
    return foreign_answer(name, known, recipes_with, prefix)


def read_study(folder: Path) -> dict[str, Any] | None:
    """Returns the content of study.json; None if the folder contains no study."""
    file = folder / STUDY
    try:
        record = read_json(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); restore it or choose another --output_dir") from None
    if not isinstance(record, dict) or record.get("kind") != "study":
        raise UserError(f"{file} does not describe a study; choose another --output_dir")
    for name, kind in _KINDS.items():
        value = record.get(name)
        words = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
        if type(value) is not kind or not all(isinstance(word, str) for word in words):
            raise UserError(f"{file} is damaged ({name} is missing or of another type); restore it from a copy")
    if record["direction"] not in DIRECTIONS:
        raise UserError(f"{file} is damaged (direction is none of {', '.join(DIRECTIONS)}); restore it from a copy")
    return record


def _refuse(folder: Path, name: str, before: object, now: object) -> None:
    raise ConfigError(
        f"{folder} contains a study in which {name} is {before}, not {now}; repeat its command, or choose another "
        "--output_dir"
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
