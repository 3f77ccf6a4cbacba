"""`unisono train RECIPE`: trains a recipe, and starts one rank per device unless a launcher has started them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from unisono.cli.arguments import StoreOnce, TrainingCommand, TrainingParser
from unisono.cluster.signals import stop_before_start
from unisono.config.file import as_yaml
from unisono.config.help import help_text
from unisono.config.resolve import Resolved
from unisono.engine.checks import check_run
from unisono.engine.recipe import Recipe
from unisono.engine.start.registry import BUILT_IN, load_recipe
from unisono.engine.start.run import configure, start
from unisono.engine.start.srun import with_outcome
from unisono.errors import EXIT_DONE, EXIT_STOPPED
from unisono.settings import Settings
from unisono.typed_paths import as_typed, note_start_folder

_DESCRIPTION = """Train a recipe on one device or many.

RECIPE is {recipes}, my_file.py:MyRecipe or package.module:MyRecipe.
`unisono train RECIPE --help` also lists the recipe's own settings. Flags override config files, which override
defaults. Flags may be written with hyphens or underscores. A run started again with the same --output_dir continues
from its last checkpoint, on any number of devices.

Exit codes: 0 done, 2 user error, 3 training failed, 75 stopped by a signal with a checkpoint."""


def parser() -> TrainingParser:
    """Returns the parser of `unisono train`."""
    description = _DESCRIPTION.format(recipes=", ".join(BUILT_IN))
    train = TrainingParser("train", "RECIPE [--config FILE ...] [--print_config] [settings as flags]", description)
    train.add_argument(
        "--on",
        metavar="ray[:HOST:PORT]",
        action=StoreOnce,
        help="train on a Ray cluster: Ray places --nnodes machines, each with --gpus N GPUs or --nproc N CPU ranks "
        "(default address: RAY_ADDRESS, or the cluster of this machine; see docs/ray.md)",
    )
    train.add_argument("--print_config", action="store_true", help="check and print the resolved settings, and exit")
    return train


def main(argv: list[str]) -> int:
    """Runs the command; returns 0 when done, or 75 if a signal stopped the run with a checkpoint."""
    note_start_folder()
    if not {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"} & os.environ.keys():
        stop_before_start()  # before importing torch, which takes seconds
    return with_outcome(lambda: _train(argv))


def _train(argv: list[str]) -> int:
    recipe, files, flags, options = parse_command(argv)
    if options.help:
        kind = load_recipe(recipe) if recipe else None
        settings = (
            help_text([Settings, kind.Config], kind.defaults, kind.aliases) if kind else help_text([Settings], {})
        )
        print(f"{parser().format_help()}\n{settings}")
        return EXIT_DONE
    kind = load_recipe(recipe)
    resolved = configure(kind, file=files, flags=flags)
    if options.print_config:
        print(as_yaml(_fitted(_check(kind, resolved, options.on), resolved)), end="")
        return EXIT_DONE
    result = _start(kind, resolved, options.on)
    if result.status == "stopped":
        line = (
            f"stopped at step {result.step}; to continue, run the same command with "
            f"--output_dir {as_typed(result.folder)}"
        )
        with suppress(OSError):  # after SIGHUP the terminal may be gone
            print(line, file=sys.stderr)
        return EXIT_STOPPED
    return EXIT_DONE


def _start(kind: type[Recipe], resolved: Resolved, on: str | None) -> Any:
    if on is None:
        return start(kind, resolved)
    from unisono.ray.connection import address_in
    from unisono.ray.start import start_on_ray

    return start_on_ray(kind, resolved, address_in(on))


def _check(kind: type[Recipe], resolved: Resolved, on: str | None) -> Recipe:
    if on is None:
        return check_run(kind, resolved)
    from unisono.ray.connection import address_in
    from unisono.ray.start import without_machines

    address_in(on)
    return check_run(kind, without_machines(resolved))


def _fitted(recipe: Recipe, resolved: Resolved) -> Resolved:
    """Returns the settings that `--fit` chooses for a GPU of `--gpu_memory_gb`, and explains them on stderr."""
    if resolved.values["fit"] == "no":
        return resolved
    from unisono.engine.fit.without_gpu import fit_settings  # imports torch, which takes seconds

    resolved, remarks = fit_settings(recipe, resolved)
    for remark in remarks:
        print(f"unisono: {remark}", file=sys.stderr)
    return resolved


def parse_command(argv: list[str]) -> TrainingCommand:
    """Parses the arguments of `unisono train`: the recipe, its config files, and the flags of its settings."""
    return parser().parse_training(argv)
