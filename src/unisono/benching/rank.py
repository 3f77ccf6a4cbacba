"""The entry point of each rank of a measured run; `unisono.engine.start.rank` calls it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.benching.measured_trainer import MeasuredTrainer
from unisono.config.resolve import Resolved
from unisono.data.stream import is_stream
from unisono.engine.start.rank_start import RankStart
from unisono.engine.start.registry import load_recipe
from unisono.engine.start.session import run_session
from unisono.engine.training_run import TrainingRun
from unisono.errors import UserError
from unisono.observe.folder import METRICS
from unisono.observe.json_lines import JsonLines
from unisono.settings import Settings

PHASES = ("step_ms", "data_wait_ms", "comm_ms", "mfu")
"""Fields of metrics.jsonl to average over the timed steps."""


def measure(arguments: Mapping[str, Any], start: RankStart) -> dict[str, Any] | None:
    """Measures one case together with all other ranks; returns the measurements, or None if a signal stopped it."""
    recipe_class = load_recipe(arguments["recipe"])
    resolved = Resolved.from_json((Settings, recipe_class.Config), arguments["resolved"])
    trainers = list[MeasuredTrainer]()

    def make_trainer(run: TrainingRun, open_folder: Any) -> MeasuredTrainer:
        if is_stream(run.datasets.train):
            raise UserError('bench reads samples several times, and dataset("train") is a stream; pass a map-style one')
        trainers.append(MeasuredTrainer(run, open_folder, **arguments["options"]))
        return trainers[0]

    result = run_session(recipe_class, resolved, start, make_trainer)
    if result.status == "stopped":
        return None
    [trainer] = trainers
    return {**trainer.numbers, "phases": phases(result.folder / METRICS, arguments["options"]["warmup"])}


def phases(file: Path, warmup: int) -> dict[str, float]:
    """Averages the phases of a step over the steps after the warm-up, from the records of metrics.jsonl.

    The averages do not include the time of the hand-written loop.
    """
    sums, steps, last = dict[str, float](), dict[str, int](), warmup
    for record in JsonLines(file):
        step = record.get("step")
        if not isinstance(step, int) or step <= warmup:
            continue
        number, last = step - last, step
        for name in PHASES:
            if isinstance(value := record.get(name), int | float):
                sums[name] = sums.get(name, 0.0) + number * value
                steps[name] = steps.get(name, 0) + number
    return {name: total / steps[name] for name, total in sums.items()}
