"""What a start prints and writes about its run: the banner, notes, run.json and events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.checkpoint.aside import set_aside_after
from unisono.engine.length import is_evaluated
from unisono.engine.run_folder.new_folder import defaults_of, versions
from unisono.engine.run_folder.stored_settings import sources_of
from unisono.engine.start.banner import banner_of
from unisono.engine.start.registry import importable_name
from unisono.engine.training_run import TrainingRun
from unisono.observe.repeated_steps import count_repeated_steps
from unisono.observe.status_line import print_line
from unisono.typed_paths import as_typed


def announce(run: TrainingRun, earlier_remarks: Sequence[str]) -> None:
    """Prints the banner and the notes, and queues the start's entry in run.json and events.jsonl; main rank only.

    The run folder opens after the first step and writes what is queued then.
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
    details: dict[str, Any] = {"changed": entered.changed} if entered.changed else {}
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
            "config": {**resolved.to_json()["values"], "output_dir": as_typed(folder.path)},
            "sources": sources_of(resolved, entered.origin),
            "defaults": defaults_of(entered.recipe_class),
            "labels": {name: list(names) for name, names in components.recipe.labels.items()},
            "seed": entered.settings.run.seed,
            "global_batch": components.state.global_batch,
            "versions": versions(),
            "launcher": run.rank.world.describe(),
        }
    )
    identity = {"recipe": entered.recipe_name, "run": run.run_id}
    for aside, why in set_aside_after(entered.checkpoints, run.start_step, identity, run.checkpoint.bad):
        folder.event("set_aside", step=run.start_step, rank=0, checkpoint=aside.name, why=why)
        print_line(f"note: set aside as {aside.name}: {why}")
