"""`unisono bench RECIPE --gpus 1,2,4`: measures the speed of a recipe on several numbers of ranks."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from unisono.cli.arguments import StoreOnce, TrainingParser
from unisono.engine.start.registry import load_recipe
from unisono.engine.start.settings_source import SettingsSource
from unisono.errors import EXIT_DONE, EXIT_STOPPED, ConfigError
from unisono.typed_paths import as_typed, note_start_folder

if TYPE_CHECKING:
    from unisono.benching.result import Bench

_DESCRIPTION = """Measure the speed of a recipe on several numbers of GPUs or CPU ranks.

For each number of ranks, the table shows throughput, step time with its spread, scaling efficiency, utilization (MFU),
the fractions of time spent on communication and on waiting for data, peak memory, and the overhead of unisono compared
with a hand-written PyTorch loop. Both loops run alternately in the same processes and must produce the same losses.

The benchmark does not touch your run folders and saves no checkpoint. It prints the table and writes bench.md (the
same table), bench.json and a plot, bench.svg, to --output_dir (default: runs/bench-<recipe>-<time>, always a new
folder).

Every other setting of `unisono train` is also a flag here.

Exit codes: 0 measured, 2 user error, 3 a run failed, 75 stopped by a signal."""


def _parser() -> TrainingParser:
    parser = TrainingParser("bench", "RECIPE [--gpus 1,2,4 | --nproc 1,2] [--scaling strong] [settings]", _DESCRIPTION)
    for name, metavar, text in (
        ("gpus", "N,N,...", "numbers of GPUs to measure (default: powers of two up to all GPUs)"),
        ("nproc", "N,N,...", "numbers of CPU ranks to measure, each with the same number of threads"),
        ("steps", "N", "timed steps per round (default: 10)"),
        ("warmup", "N", "steps before the first round, not timed (default: 10)"),
        ("rounds", "N", "rounds of --steps steps with each loop; more rounds narrow the spread (default: 8)"),
    ):
        parser.add_argument(f"--{name}", metavar=metavar, action=StoreOnce, help=text)
    parser.add_argument(
        "--scaling",
        choices=["weak", "strong"],
        default="weak",
        help="weak: the batch size per rank is fixed, and the global batch size grows with the number of ranks; "
        "strong: the global batch size is fixed at that of the measurement with the fewest ranks (default: weak)",
    )
    parser.add_argument(
        "--overhead",
        choices=["auto", "no"],
        default="auto",
        help="no: skip the hand-written loop, which halves the duration of the benchmark (default: auto)",
    )
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns 75 if a signal stopped it."""
    note_start_folder()
    parser = _parser()
    recipe, files, flags, options = parser.parse_training(argv)
    if options.help:
        parser.print_help()
        return EXIT_DONE
    kind = load_recipe(recipe)
    from unisono.benching.bench import BenchStopped, run_bench
    from unisono.benching.options import BenchOptions

    numbers = {name: _number(name, text) for name in ("steps", "warmup", "rounds") if (text := getattr(options, name))}
    chosen = BenchOptions(options.gpus, options.nproc, options.scaling, overhead=options.overhead == "auto", **numbers)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        result = run_bench(kind, recipe, chosen, SettingsSource(tuple(files), tuple(flags)), say)
    except BenchStopped as stopped:
        with suppress(OSError):  # after SIGHUP the terminal may be gone
            say(str(stopped))
        return EXIT_STOPPED
    _print(result)
    return EXIT_DONE


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(f"--{name} {text}: expected a whole number")
    return int(text)


def _print(result: Bench) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from unisono.benching.bench import JSON, PLOT, TABLE
    from unisono.benching.tables import notes_of, table_of, title_of

    heads, rows = table_of(result)
    table = Table(title=escape(title_of(result)), title_justify="left")
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(table)
    for note in notes_of(result):
        console.print(escape(note))
    names = f"{JSON}, {TABLE}, {PLOT}"
    print(f"written: {as_typed(result.folder)}/ ({names})")
