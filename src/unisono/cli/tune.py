"""`unisono tune RECIPE --search …`: searches for good settings of a recipe."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING

from unisono.cli.arguments import TrainingParser
from unisono.engine.start.registry import load_recipe
from unisono.engine.start.settings_source import SettingsSource
from unisono.errors import EXIT_DONE, EXIT_STOPPED, ConfigError
from unisono.tuning.plan import DIRECTIONS, PRUNERS, SAMPLERS, StudyOptions
from unisono.tuning.space import split_flag
from unisono.typed_paths import as_typed, note_start_folder

if TYPE_CHECKING:
    from unisono.tuning.study import Study

_DESCRIPTION = """Search for good settings of a recipe with Optuna.

Each trial is a run of `unisono train` in its own folder, with its own values of the settings that --search names.
Several trials can run in parallel, each on some of the GPUs or on CPU ranks, and a trial stops early if it is worse
than the others. The same command with the same --output_dir continues a study that was stopped or killed; its trials
continue from their checkpoints.

  --search learning_rate=log:1e-5..1e-2     a range on a logarithmic scale
  --search warmup_steps=0..200              a range of whole numbers, because warmup_steps is a whole number
  --search hidden=32..256:32                a range in steps of 32
  --search optimizer='adamw|sgd|muon'       choices

Every setting of `unisono train` is also a flag here, for all trials. --gpus are divided between parallel trials.

Exit codes: 0 all trials finished, 2 user error, 3 all trials failed, 75 stopped by a signal."""

_SHOWN = 20


def _parser() -> TrainingParser:
    parser = TrainingParser("tune", "RECIPE --search NAME=VALUES ... [--trials 20] [settings]", _DESCRIPTION)
    add_search_arguments(parser)
    parser.add_argument(
        "--join",
        action="store_true",
        help="work on the study in --output_dir together with other processes, also on other machines, that run the "
        "same command; this process ends when no trial is left for it",
    )
    return parser


def add_search_arguments(parser: TrainingParser) -> None:
    """Adds --search and an option for each field of StudyOptions."""
    docs = {
        "trials": ("N", "number of finished trials, including pruned and failed ones, after which the study ends"),
        "objective": ("METRIC", "evaluation metric to optimize (default: best_metric if it is set, else eval/loss)"),
        "direction": (None, "whether a smaller or a larger objective is better (default: minimize, or best_mode)"),
        "pruner": (
            None,
            "when a trial stops early, at an evaluation (--eval_every). median: it is worse than the median of "
            "earlier trials at the same step; hyperband: by successive halving with several budgets",
        ),
        "pruner_startup_trials": ("N", "median: number of complete trials before the first one is pruned"),
        "sampler": (None, "tpe: learns from finished trials which values are promising; random: does not"),
        "parallel": ("N", "number of trials that run at the same time"),
    }
    choices = {"direction": DIRECTIONS, "pruner": PRUNERS, "sampler": SAMPLERS}
    parser.add_argument(
        "--search", action="append", default=[], metavar="NAME=VALUES", help="a setting and its values to try"
    )
    for option in fields(StudyOptions):
        metavar, text = docs[option.name]
        default = f" (default: {option.default})" if option.default is not None else ""
        parser.add_argument(
            f"--{option.name}",
            default=None,
            metavar=metavar,
            choices=choices.get(option.name),
            type=int if isinstance(option.default, int) else str,
            help=text + default,
        )


def search_of(options: argparse.Namespace) -> tuple[dict[str, object], StudyOptions]:
    """Returns the settings to search over, with their values, and the options of the search."""
    search: dict[str, object] = {}
    for flag in options.search:
        name, values = split_flag(flag)
        if name in search:
            raise ConfigError(f"--search {name} is given twice; remove one of them")
        search[name] = values
    chosen = {f.name: getattr(options, f.name) for f in fields(StudyOptions) if getattr(options, f.name) is not None}
    return search, StudyOptions(**chosen)


def main(argv: list[str]) -> int:
    """Runs the command; returns 75 if a signal stopped the study."""
    note_start_folder()
    parser = _parser()
    recipe, files, flags, options = parser.parse_training(argv)
    if options.help:
        parser.print_help()
        return EXIT_DONE
    search, study_options = search_of(options)
    kind = load_recipe(recipe)
    from unisono.tuning.tune import StudyStopped, run_study

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        source = SettingsSource(tuple(files), tuple(flags))
        study = run_study(kind, recipe, search, study_options, source, say, shared=options.join)
    except StudyStopped as stopped:
        with suppress(OSError):  # after SIGHUP the terminal may be gone
            say(str(stopped))
        return EXIT_STOPPED
    _print(study)
    return EXIT_DONE


def _print(study: Study) -> None:
    from rich.console import Console
    from rich.table import Table

    from unisono.tuning.page import PAGE, table_rows

    heads, rows = table_rows(study, _SHOWN)
    title = f"{study.direction} {study.objective}: {study.num_finished} trials"
    if unfinished := study.count("unfinished"):
        title += f", {unfinished} unfinished"
    if len(study.trials) > _SHOWN:
        title += f", the best {_SHOWN}"
    table = Table(title=title)
    for head in heads:
        table.add_column(head, justify="left" if head == "outcome" else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    print(f"page: {as_typed(study.folder / PAGE)}")
    command = study.best_command()
    if command is None or study.best is None:
        print("no trial is complete")
    else:
        print(f"best trial, {study.best.number}:\n{command}")
