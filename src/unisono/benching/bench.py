"""Runs a benchmark: measures the cases one after another, and writes the result to a new folder."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from unisono.atomic_files import write_atomically
from unisono.benching.case_run import CaseRun
from unisono.benching.cases import Case, make_cases
from unisono.benching.conditions import conditions
from unisono.benching.options import BenchOptions
from unisono.benching.plot import draw
from unisono.benching.result import Bench, make_rows
from unisono.benching.tables import markdown_of
from unisono.cluster.environment import detect
from unisono.cluster.launch.job_folder import job_folder
from unisono.cluster.signals import handling_stop_signals
from unisono.config.resolve import Resolved
from unisono.config.values import jsonable
from unisono.devices import num_cpu_cores
from unisono.engine.recipe import Recipe
from unisono.engine.run_folder.new_folder import default_folder
from unisono.engine.start.registry import check_recipe, importable_name, load_recipe
from unisono.engine.start.settings_source import SettingsSource, source_of
from unisono.errors import EXIT_STOPPED, ConfigError, UnisonoError, UserError
from unisono.formatting import format_count
from unisono.observe.folder import check_writable
from unisono.typed_paths import absolute, as_typed, note_start_folder

JSON, TABLE, PLOT = "bench.json", "bench.md", "bench.svg"


class BenchStopped(UnisonoError):
    """Raised if a signal stopped the benchmark."""

    exit_code = EXIT_STOPPED


def bench(
    recipe: type[Recipe] | str,
    config: Any = None,
    *,
    gpus: int | str | Sequence[int] | None = None,
    nproc: int | str | Sequence[int] | None = None,
    scaling: str = "weak",
    steps: int = 10,
    warmup: int = 10,
    rounds: int = 8,
    overhead: bool = True,
    **settings: Any,
) -> Bench:
    """Measures the speed of a recipe on different numbers of GPUs or CPU ranks, and returns one row per number.

    `gpus` or `nproc` lists the rank counts, for instance [1, 2, 4]. `config` and the other keywords are settings of the
    run, as in `unisono.train`; `output_dir` is a new folder for the result. The recipe must be in an importable file,
    not in the script that calls this function.
    """
    note_start_folder()
    recipe_class = load_recipe(recipe) if isinstance(recipe, str) else recipe
    check_recipe(recipe_class)
    reference = recipe if isinstance(recipe, str) else importable_name(recipe_class)
    if reference is None:
        raise UserError(
            f"{recipe_class.__name__} is defined in {recipe_class.__module__}, which other processes cannot import; "
            "move it to a file of its own"
        )
    options = BenchOptions(gpus, nproc, scaling, steps, warmup, rounds, overhead)
    source = source_of(config, recipe_class, settings)
    return run_bench(recipe_class, reference, options, source, lambda text: print(text, flush=True))


def run_bench(
    recipe_class: type[Recipe],
    recipe: str,
    options: BenchOptions,
    source: SettingsSource,
    say: Callable[[str], None],
) -> Bench:
    """Measures all cases and writes the result; raises BenchStopped if a signal stops it."""
    world = detect()
    if world.launcher != "plain" and world.size > 1:
        raise UserError(f"bench starts its own ranks; start it once, without {world.launcher}")
    resolved = source.resolve(recipe_class, {})
    cases = make_cases(recipe_class, resolved, options)
    folder = new_folder(resolved, recipe_class.__qualname__)
    facts = {**conditions(), "steps": options.steps, "warmup": options.warmup, "rounds": options.rounds}
    measured = [measured for case in cases if (measured := _measure(recipe, case, cases, options, folder, say))]
    names = [name for name in resolved.values if resolved.explicit(name) and name != "output_dir"]
    facts["settings"] = {name: jsonable(resolved.values[name]) for name in names}
    command = command_of(recipe, options, source, cases)
    result = Bench(recipe_class.__qualname__, options.scaling, command, make_rows(measured), folder, facts)
    for name, text in (
        (TABLE, markdown_of(result)),
        (PLOT, draw(result)),
        (JSON, json.dumps(result.to_json(), indent=2) + "\n"),
    ):
        write_atomically(folder / name, text, durable=False, one_writer=True)
    return result


def _measure(
    recipe: str, case: Case, cases: Sequence[Case], options: BenchOptions, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    environ = {}
    if not options.uses_gpus and "OMP_NUM_THREADS" not in os.environ:
        # Use the same number of threads in every case: otherwise a single rank would use all cores.
        environ["OMP_NUM_THREADS"] = str(max(1, num_cpu_cores() // cases[-1].ranks))
    ranks = format_count(case.ranks, "GPU" if options.uses_gpus else "CPU rank")
    say(f"measuring {ranks}, {format_count(case.global_batch, 'sample')} per step")
    numbers = {name: getattr(options, name) for name in ("steps", "warmup", "rounds", "overhead")}
    received: list[str] = []
    log = folder / f"{case.ranks}.log"
    # If this command is killed, the next unisono command removes the folder.
    with job_folder() as scratch, closing(CaseRun(recipe, case, numbers, scratch, log, environ)) as run:

        def on_signal(number: int, frame: FrameType | None) -> None:
            received.append(signal.Signals(number).name)
            run.stop()

        with handling_stop_signals(on_signal):
            result = run.result()
    if result is None:
        name = received[0] if received else "a signal"
        raise BenchStopped(f"stopped by {name}; no result was written to {as_typed(folder)}")
    return result


def new_folder(resolved: Resolved, recipe: str) -> Path:
    """Creates the output folder; raises ConfigError if output_dir names a folder that is not empty."""
    typed = resolved.values["output_dir"]
    wanted = absolute(typed or default_folder(f"bench-{recipe}"))
    check_writable(wanted)
    folder, number = Path(wanted), 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if typed and not any(folder.iterdir()):
                return folder
            if typed:
                raise ConfigError(f"output_dir {as_typed(wanted)} is not empty; choose a new folder") from None
            number += 1
            folder = Path(f"{wanted}-{number}")


def command_of(recipe: str, options: BenchOptions, source: SettingsSource, cases: Sequence[Case]) -> str:
    """Returns the command that repeats the measurement."""
    counts = ",".join(str(case.ranks) for case in cases)
    words = ["unisono", "bench", recipe, "--gpus" if options.uses_gpus else "--nproc", counts]
    defaults = asdict(BenchOptions())
    for name in ("scaling", "steps", "warmup", "rounds"):
        if (value := getattr(options, name)) != defaults[name]:
            words += [f"--{name}", str(value)]
    if not options.overhead:
        words += ["--overhead", "no"]
    for name, value in source.overrides.items():
        if name != "output_dir":
            words.append(f"--{name}={json.dumps(jsonable(value)) if not isinstance(value, str) else value}")
    return shlex.join([*words, *source.arguments_without_overrides()])
