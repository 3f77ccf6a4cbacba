"""Builds a run on this rank, phase by phase: checkpoint, batch, recipe, data, model, restored state, length.

Every rank goes through the same phases in the same order, because most of them contain a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from unisono.cluster.process_group import COLLECTIVE_TIMEOUT
from unisono.engine.batch import BatchPlan
from unisono.engine.build.components import build_components
from unisono.engine.build.device import find_placement
from unisono.engine.evaluate import Evaluation
from unisono.engine.length import Length, fit_warmup, is_evaluated
from unisono.engine.rank_context import RankContext
from unisono.engine.recipe import Work
from unisono.engine.recorder import Recorder
from unisono.engine.resume import ChosenCheckpoint
from unisono.engine.run_folder.choose_checkpoint import resume_from
from unisono.engine.run_folder.enter import EnteredRun
from unisono.engine.start.banner import idle_faults
from unisono.engine.start.datasets import Datasets, build_datasets
from unisono.engine.start.prepare import StoppedBeforeTraining, build_recipe, prepare, work_of
from unisono.engine.start.resume_point import ResumePoint, find_resume_point, plan_run_batch
from unisono.engine.step.components import Components
from unisono.engine.training_run import TrainingRun
from unisono.faults import parse
from unisono.settings import Settings


@dataclass(frozen=True, kw_only=True)
class BuiltRun:
    """Everything that a start has decided, built and restored before the first step, on this rank."""

    entered: EnteredRun
    run_id: str
    batch: BatchPlan
    datasets: Datasets
    components: Components
    checkpoint: ChosenCheckpoint  # the one that was restored, if any
    start_step: int
    length: Length
    save_group: dist.ProcessGroup | None  # for the collectives of saves, which run in a thread of their own
    work: Work  # this rank's part of the recipe's own work
    remarks: list[str]  # notes for the user, from every phase of the start

    @property
    def identity(self) -> dict[str, Any]:
        """What every checkpoint says about the run it belongs to."""
        return {
            "recipe": self.entered.recipe_name,
            "seed": self.entered.settings.run.seed,
            "global_batch": self.batch.global_batch,
            "run": self.run_id,
        }


def build_run(rank: RankContext, entered: EnteredRun, requested_devices: int | None) -> BuiltRun:
    """Builds the run and restores its checkpoint; StoppedBeforeTraining if a signal came while the recipe prepared.

    `requested_devices`: the user asked for so many on this machine, also where fewer are available.
    """
    settings, world = entered.settings, rank.world
    placement = find_placement(world, settings)
    point = find_resume_point(rank, entered)
    batch = plan_run_batch(rank, entered, point.path, placement, requested_devices=requested_devices)
    recipe = build_recipe(entered, placement)
    work = work_of(rank, entered, placement.device)
    if prepare(recipe, work, rank):
        raise StoppedBeforeTraining(point.step)
    datasets = build_datasets(recipe, entered, batch.plan, rank)
    components = build_components(recipe, settings, placement, batch.plan)
    save_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if world.size > 1 else None
    checkpoint = _restore(point, components, entered, datasets.num_samples, rank, save_group)
    length = _derive_length(entered, components, datasets.num_samples, world.size)
    evaluated = is_evaluated(components.state, length.length)
    recipe.evaluations = rank.main_decides(
        lambda: entered.folder.evaluations(components.state.step, evaluated=evaluated)
    )
    resumed = [] if checkpoint is point.checkpoint else checkpoint.remarks
    return BuiltRun(
        entered=length.entered,
        run_id=point.run_id,
        batch=batch.plan,
        datasets=datasets,
        components=components,
        checkpoint=checkpoint,
        start_step=components.state.step,
        length=length.length,
        save_group=save_group,
        work=work,
        remarks=[*point.checkpoint.remarks, *batch.remarks, *datasets.remarks, *resumed, *length.remarks],
    )


def _restore(
    point: ResumePoint,
    components: Components,
    entered: EnteredRun,
    num_samples: int,
    rank: RankContext,
    save_group: dist.ProcessGroup | None,
) -> ChosenCheckpoint:
    """Restores the checkpoint that the start continues from, if there is one; returns the one that was restored."""
    checkpoint = point.checkpoint
    if checkpoint.path is not None:
        identity = {"recipe": entered.recipe_name, "run": point.run_id}
        checkpoint = resume_from(
            checkpoint, components, entered.checkpoints, identity, num_samples, rank=rank, group=save_group
        )
    components.state.num_samples = num_samples
    return checkpoint


@dataclass(frozen=True)
class _DerivedLength:
    length: Length
    entered: EnteredRun  # with the settings that follow from the length
    remarks: list[str]


def _derive_length(entered: EnteredRun, components: Components, num_samples: int, world_size: int) -> _DerivedLength:
    """How many steps the run has, and the settings that follow from it."""
    recipe, state = components.recipe, components.state
    whole_epochs = recipe.whole_epochs
    per_epoch = recipe.samples_per_epoch or num_samples
    length = Length.of(entered.settings, per_epoch, state, whole_epochs=whole_epochs)
    resolved, warmup_remarks = fit_warmup(entered.resolved, length.steps, whole_epochs=whole_epochs)
    settings = resolved.build(Settings)
    remarks = [
        *idle_faults(parse(settings.run.inject), world_size, length.steps),
        *warmup_remarks,
        *length.remarks(settings, 0 if whole_epochs else state.step, resolved.explicit),
    ]
    return _DerivedLength(length, replace(entered, resolved=resolved, settings=settings), remarks)


def training_run(run: BuiltRun, rank: RankContext, after_first_step: Callable[[], None]) -> TrainingRun:
    """What the trainer needs of a run; the recorder calls `after_first_step` once the first step has succeeded."""
    settings, components, folder = run.entered.settings, run.components, run.entered.folder
    recorder = Recorder(
        folder,
        components.strategy.placement,
        settings.observe,
        rank.agreement,
        total_steps=run.length.steps,
        start_step=components.state.step,
        start_samples=components.state.samples,
        recordable=components.recordable,
        open_folder=after_first_step,
    )
    evaluation = None
    if (dataset := run.datasets.evaluation) is not None:
        evaluation = Evaluation(components.recipe, components.strategy, dataset, settings, rank)
    return TrainingRun(
        rank=rank,
        components=components,
        settings=settings,
        batch=run.batch,
        dataset=run.datasets.train,
        evaluation=evaluation,
        folder=folder,
        recorder=recorder,
        save_group=run.save_group,
        identity=run.identity,
        work=run.work,
    )
