"""`unisono train RECIPE`: trains a recipe, and starts one rank per device unless a launcher has started them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from unisono.cli.arguments import TrainingParser, TrainingWords
from unisono.cluster.signals import stop_before_start
from unisono.config.file import as_yaml
from unisono.config.help import help_text
from unisono.engine.checks import check_run
from unisono.engine.start.registry import BUILT_IN, load_recipe
from unisono.engine.start.run import configure, start
from unisono.engine.start.srun import with_outcome
from unisono.errors import EXIT_DONE, EXIT_STOPPED, UserError
from unisono.settings import Settings
from unisono.typed_paths import note_start_folder, shown

_DESCRIPTION = """Train a recipe on one device or many.

RECIPE is {recipes}, my_file.py:MyRecipe or package.module:MyRecipe. With a recipe, --help also lists its settings.
Flags override config files, and config files override defaults. Flags may be written with hyphens or underscores.
Started again with the same --output_dir, a run continues from its last checkpoint, on any number of devices.
Exit codes: 0 done, 2 your mistake, 3 training failed, 75 stopped by a signal with a checkpoint."""


def parser() -> TrainingParser:
    """The parser of `unisono train`."""
    description = _DESCRIPTION.format(recipes=", ".join(BUILT_IN))
    made = TrainingParser("train", "RECIPE [--config FILE ...] [--print_config] [settings as flags]", description)
    made.add_argument(
        "--print_config", action="store_true", help="check the settings, print them as resolved, and exit"
    )
    return made


def main(words: list[str]) -> int:
    """Runs the command; 0 done, 75 stopped by a signal with a checkpoint."""
    note_start_folder()
    if not {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"} & os.environ.keys():
        stop_before_start()  # importing torch takes seconds
    return with_outcome(lambda: _train(words))


def _train(words: list[str]) -> int:
    recipe, files, flags, options = split_words(words)
    if options.help:
        kinds: list[type] = [Settings]
        kind = load_recipe(recipe) if recipe else None
        if kind is not None:
            kinds.append(kind.Config)
        defaults, aliases = (kind.defaults, kind.aliases) if kind else ({}, {})
        print(parser().format_help() + "\n" + help_text(kinds, defaults, aliases))
        return EXIT_DONE
    if recipe is None:
        raise UserError("train: no recipe is given; for instance: unisono train my_file.py:MyRecipe --gpus all")
    kind = load_recipe(recipe)
    resolved = configure(kind, file=files, flags=flags)
    if options.print_config:
        check_run(kind, resolved)
        print(as_yaml(resolved), end="")
        return EXIT_DONE
    result = start(kind, resolved)
    if result.status == "stopped":
        line = (
            f"stopped at step {result.step}; run the same command with --output_dir {shown(result.folder)} to continue"
        )
        with suppress(OSError):  # after SIGHUP the terminal may be gone
            print(line, file=sys.stderr)
        return EXIT_STOPPED
    return EXIT_DONE


def split_words(words: list[str]) -> TrainingWords:
    """Takes the command line of `unisono train` apart: the recipe, its config files, and the flags of its settings."""
    return parser().read_training(words)
