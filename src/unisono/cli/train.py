"""unisono train RECIPE [--config FILE]... [flags]: trains; starts its own ranks when not already under a launcher."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from unisono.cluster.signals import stop_before_start
from unisono.config.file import as_yaml
from unisono.config.help import help_text
from unisono.engine.registry import BUILT_IN, load_recipe
from unisono.engine.run import configure, start
from unisono.engine.srun import with_outcome
from unisono.errors import EXIT_DONE, EXIT_STOPPED, ConfigError, UserError
from unisono.settings import Settings

_USAGE = """usage: unisono train RECIPE [--config FILE ...] [--print_config] [flags]

RECIPE is {recipes}, my_file.py:MyRecipe or package.module:MyRecipe. With a recipe, --help also shows its own settings.
Flags win over files, files over defaults; hyphens and underscores are the same.
Started again with the same --output_dir, a run goes on where it stopped, on any number of devices.
Exit codes: 0 done, 2 your mistake, 3 training failed and says why, 75 stopped by a signal with a checkpoint.

  --config FILE
      YAML or JSON file with any of the settings below. May be given several times: later files win.
      Its key `include` names files that are read first: `include: base.yaml`, or a list.
  --print_config
      Print the settings as resolved and stop.
"""


def main(words: list[str]) -> int:
    """Runs the command; 0 done, 75 stopped by a signal with a checkpoint."""
    if not {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"} & os.environ.keys():
        stop_before_start()  # importing torch takes seconds
    return with_outcome(lambda: _train(words))


def _train(words: list[str]) -> int:
    recipe, files, flags, wants_help, wants_config = split_words(words)
    if wants_help:
        kinds: list[type] = [Settings]
        kind = load_recipe(recipe) if recipe else None
        if kind is not None:
            kinds.append(kind.Config)
        defaults, aliases = (kind.defaults, kind.aliases) if kind else ({}, {})
        print(_USAGE.format(recipes=", ".join(BUILT_IN)) + "\n" + help_text(kinds, defaults, aliases))
        return EXIT_DONE
    if recipe is None:
        raise UserError("train: which recipe? for instance: unisono train my_file.py:MyRecipe --gpus all")
    kind = load_recipe(recipe)
    resolved = configure(kind, file=files, flags=flags)
    if wants_config:
        print(as_yaml(resolved), end="")
        return EXIT_DONE
    result = start(kind, resolved)
    if result.status == "stopped":
        line = f"stopped at step {result.step}; run the same command with --output_dir {result.folder}"
        with suppress(OSError):  # the terminal may be gone: that is what SIGHUP says
            print(line, file=sys.stderr)
        return EXIT_STOPPED
    return EXIT_DONE


def split_words(words: list[str]) -> tuple[str | None, list[Path], list[str], bool, bool]:
    """Recipe, config files, the other flags, and whether --help or --print_config was among them."""
    recipe: str | None = None
    files: list[Path] = []
    flags: list[str] = []
    wants_help, wants_config = False, False
    rest = list(words)
    if rest and not rest[0].startswith("-"):
        recipe = rest.pop(0)
    while rest:
        word = rest.pop(0)
        name, has_value, _ = word.replace("-", "_").partition("=")
        if word in ("-h", "--help"):
            wants_help = True
        elif name == "__print_config":
            wants_config = True
        elif name == "__config":
            if not has_value and not rest:
                raise ConfigError("--config: expected a file")
            files.append(Path(word.partition("=")[2] if has_value else rest.pop(0)))
        else:
            flags.append(word)
    return recipe, files, flags, wants_help, wants_config
