"""Prints and records the start of a run: the banner, notes, run.json and events."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from unisono.checkpoint.aside import set_aside_after
from unisono.config.resolve import with_recipe_defaults
from unisono.engine.length import is_evaluated
from unisono.engine.recipe import Recipe
from unisono.engine.run_folder.stored_settings import sources_of
from unisono.engine.start.banner import banner_of
from unisono.engine.start.registry import importable_name
from unisono.engine.training_run import TrainingRun
from unisono.observe.redaction import redacted
from unisono.observe.repeated_steps import count_repeated_steps
from unisono.observe.status_line import print_line
from unisono.parallel.blocks.compile_cache import count_compilations
from unisono.settings import Settings
from unisono.typed_paths import as_typed


def announce(run: TrainingRun, earlier_remarks: Sequence[str]) -> None:
    """Prints the banner and the notes, and queues this start's entry in run.json and events.jsonl; main rank only.

    The run folder opens after the first step, and then writes the queued entries.
    """
    world = run.rank.world
    if not world.is_main:
        return
    entered, components, path = run.entered, run.components, run.checkpoint.path
    folder, step = entered.folder, run.start_step
    why = "new" if path is None else f"resumed from {path.name}"
    if world.restart_count:
        why += f", restart {world.restart_count}"
    folder.add_start(
        world=world.size,
        strategy=components.strategy.name,
        launcher=world.launcher,
        why=why,
        from_step=step,
        resume=entered.settings.run.resume,
    )
    details: dict[str, Any] = {"steps": run.length.steps}
    if entered.changed:
        details["changed"] = entered.changed
    if repeated := count_repeated_steps(folder.path, step):
        details["repeated"] = repeated
    event = "start" if path is None else "resume"
    folder.event(event, step=step, rank=0, world=world.size, strategy=components.strategy.name, **details)
    folder.rewind_metrics(step, evaluated=is_evaluated(components.state, run.length))
    print_line(banner_of(run, f"{as_typed(folder.path)} ({why})"))
    for remark in [*earlier_remarks, *run.remarks, *components.remarks, *dict.fromkeys(components.recipe.remarks)]:
        print_line(f"note: {remark}")


def open_run_folder(run: TrainingRun) -> None:
    """Writes run.json after the first successful step, and sets aside checkpoints of a branch that was abandoned.

    Only the main rank calls it.
    """
    entered, components = run.entered, run.components
    folder, resolved = entered.folder, entered.resolved
    folder.open(
        {
            "id": run.run_id,
            "recipe": entered.recipe_name,
            "recipe_from": importable_name(entered.recipe_class),
            "config": redacted({**resolved.to_json()["values"], "output_dir": as_typed(folder.path)}),
            "sources": sources_of(resolved, entered.origin),
            "defaults": _defaults_of(entered.recipe_class),
            "labels": {name: list(names) for name, names in components.recipe.labels.items()},
            "seed": entered.settings.run.seed,
            "global_batch": components.state.global_batch,
            "versions": _versions(),
            "launcher": run.rank.world.describe(),
        }
    )
    if entered.settings.precision.compile:
        folder.event("compile", step=run.start_step + 1, rank=0, **count_compilations())
    identity = {"recipe": entered.recipe_name, "run": run.run_id}
    for aside, why in set_aside_after(entered.checkpoints, run.start_step, identity, run.checkpoint.bad):
        folder.event("set_aside", step=run.start_step, rank=0, checkpoint=aside.name, why=why)
        print_line(f"note: set aside as {aside.name}: {why}")


def _defaults_of(recipe_class: type[Recipe]) -> dict[str, Any]:
    """Returns the default of every setting, as the recipe's `--help` shows it."""
    return with_recipe_defaults((Settings, recipe_class.Config), recipe_class.defaults).to_json()["values"]  # type: ignore[no-any-return]


def _versions() -> dict[str, str]:
    """Versions of the software and the GPU that a run's numbers depend on."""
    versions_by_name = {"python": platform.python_version(), "torch": torch.__version__} | _package_versions()
    if torch.cuda.is_available():
        versions_by_name["cuda"] = str(torch.version.cuda)
        versions_by_name["gpu"] = torch.cuda.get_device_name()
    return versions_by_name


@cache
def _package_versions() -> dict[str, str]:
    versions_by_name = {}
    for package in ("unisono", "safetensors", "numpy", "diffusers", "transformers", "peft", "accelerate"):
        with suppress(PackageNotFoundError):  # reads metadata, because an import would take seconds
            versions_by_name[package] = version(package)
    return versions_by_name
