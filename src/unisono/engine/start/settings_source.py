"""Where the settings of several runs of one recipe come from: config files and flags, or values from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.config.resolve import Resolved
from unisono.engine.recipe import Recipe
from unisono.engine.start.run import configure


@dataclass(frozen=True)
class SettingsSource:
    """Where the settings that all runs share come from, as in `unisono train`."""

    files: tuple[Path, ...] = ()
    flags: tuple[str, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Settings that a Python caller passes. They reach other processes in a file."""

    def resolve(self, recipe_class: type[Recipe], more: Mapping[str, str]) -> Resolved:
        """The settings of a run with these further flags."""
        flags = [*self.flags, *(f"--{name}={value}" for name, value in more.items())]
        return configure(recipe_class, file=self.files, flags=flags, overrides=self.overrides)

    def arguments(self, settings_file: Path) -> list[str]:
        """The arguments of `unisono train` for these settings; `settings_file` holds the overrides, if any."""
        files = [*self.files, *([settings_file] if self.overrides else [])]
        words = [word for file in files for word in ("--config", str(file))]
        return [*words, *without_output_dir(self.flags)]


def without_output_dir(flags: Sequence[str]) -> list[str]:
    """The flags without --output_dir, which names the folder of all runs and not that of one."""
    kept: list[str] = []
    words = iter(flags)
    for word in words:
        name, equals, _ = word.replace("-", "_").partition("=")
        if name != "__output_dir":
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept
