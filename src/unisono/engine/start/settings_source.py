"""Describes the source of settings that several runs of one recipe share: config files and flags, or Python values."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from unisono.config.resolve import Resolved
from unisono.config.values import jsonable
from unisono.engine.recipe import Recipe
from unisono.engine.start.run import configure
from unisono.errors import UserError


@dataclass(frozen=True)
class SettingsSource:
    """The source of the settings that all runs share, as in `unisono train`."""

    files: tuple[Path, ...] = ()
    flags: tuple[str, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Settings that a Python caller passes. They reach other processes in a file."""

    def resolve(self, recipe_class: type[Recipe], more: Mapping[str, str]) -> Resolved:
        """Returns the settings of a run with these further flags."""
        flags = [*self.flags, *(f"--{name}={value}" for name, value in more.items())]
        return configure(recipe_class, file=self.files, flags=flags, overrides=self.overrides)

    def arguments(self, settings_file: Path) -> list[str]:
        """Returns the arguments of `unisono train` for these settings; `settings_file` holds the overrides, if any."""
        extra = ["--config", str(settings_file)] if self.overrides else []
        files = [word for file in self.files for word in ("--config", str(file))]
        return [*files, *extra, *without_output_dir(self.flags)]

    def arguments_without_overrides(self) -> list[str]:
        """Returns the arguments that name the config files, and the flags."""
        return [*(word for file in self.files for word in ("--config", str(file))), *without_output_dir(self.flags)]


def source_of(
    config: Any, recipe_class: type[Recipe], settings: Mapping[str, Any], searched: Collection[str] = ()
) -> SettingsSource:
    """Returns the settings that a Python caller passes: `config` as in `unisono.train`, overridden by `settings`.

    `searched` are names of settings that `config` must not set, because each run has its own values.
    """
    aliases = recipe_class.aliases
    names = {aliases.get(name, name) for name in (*settings, *searched)}
    files, passed = _from_config(config, recipe_class)
    kept = {name: value for name, value in passed.items() if aliases.get(name, name) not in names}
    return SettingsSource(files, (), {name: jsonable(value) for name, value in {**kept, **settings}.items()})


def _from_config(config: Any, recipe_class: type[Recipe]) -> tuple[tuple[Path, ...], dict[str, Any]]:
    """Returns config files, or settings by name, from the `config` of a Python caller."""
    if config is None:
        return (), {}
    if isinstance(config, str | os.PathLike):
        return (Path(config),), {}
    if isinstance(config, list | tuple):
        return tuple(Path(file) for file in config), {}
    if isinstance(config, Mapping):
        return (), dict(config)
    if is_dataclass(config) and isinstance(config, recipe_class.Config):
        return (), {f.name: getattr(config, f.name) for f in fields(config)}
    raise UserError(
        f"config: expected {recipe_class.__name__}.Config, a mapping, a file or files, got {type(config).__name__}"
    )


def without_output_dir(flags: Sequence[str]) -> list[str]:
    """Returns the flags without --output_dir, which names the folder of all runs and not of a single run."""
    kept: list[str] = []
    words = iter(flags)
    for word in words:
        name, equals, _ = word.replace("-", "_").partition("=")
        if name != "__output_dir":
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept
