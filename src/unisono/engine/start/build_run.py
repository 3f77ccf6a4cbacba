"""Builds a run on this rank, phase by phase: checkpoint, batch, recipe, data, model, restored state, length.

Every rank goes through the same phases in the same order, because most of them contain a collective.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from unisono.checkpoint.find import read_extra
from unisono.cluster.process_group import COLLECTIVE_TIMEOUT
from unisono.engine.batch import BatchPlan, overruled, plan_batch, with_micro_batch
from unisono.engine.build.choose_strategy import check_strategy
from unisono.engine.build.components import build_components
from unisono.engine.build.datasets import build_datasets
from unisono.engine.build.device import find_placement
from unisono.engine.build.gpu_memory import limit_gpu_memory
from unisono.engine.fit.at_start import fit_run
from unisono.engine.length import Length, fit_warmup, is_evaluated
from unisono.engine.memory.micro_batch_size import stored_size
from unisono.engine.rank_context import RankContext
from unisono.engine.recipe import Part
from unisono.engine.run_folder.choose_checkpoint import find_resume_point, resume_from
from unisono.engine.run_folder.enter import EnteredRun
from unisono.engine.start.banner import idle_faults
from unisono.engine.start.prepare import StoppedBeforeTraining, build_recipe, prepare, work_of
from unisono.engine.step.components import Components
from unisono.engine.training_run import TrainingRun
from unisono.faults import parse
from unisono.parallel.strategy import Placement
from unisono.settings import Settings


def build_run(rank: RankContext, entered: EnteredRun, requested_devices: int | None) -> TrainingRun:
    """Builds the run and restores its checkpoint. Raises StoppedBeforeTraining if a signal arrives during prepare().

    `requested_devices` is the number of devices that the user requested on this machine, even if fewer are available.
    """
    settings, world = entered.settings, rank.world
    placement = replace(find_placement(world, settings), nodes=tuple(rank.agreement.all_gather(world.node)))
    check_strategy(settings.parallel, placement)
    point = find_resume_point(rank, entered)
    batch, batch_remarks = _plan_batch(rank, entered, point.path, placement, requested_devices)
    limit_gpu_memory(settings, placement.device)
    recipe = build_recipe(entered, placement)
    recipe.part = Part(placement.data_rank, placement.data_world)
    work = work_of(rank, entered, placement.device)
    if prepare(recipe, work, rank):
        raise StoppedBeforeTraining(point.step)
    datasets = build_datasets(recipe, settings, entered.resolved, batch, rank)
    fitted = fit_run(recipe, datasets.train, entered, batch, placement, rank)
    entered, batch, settings = fitted.entered, fitted.batch, fitted.entered.settings
    components = build_components(recipe, settings, placement, batch, rank.agreement)
    save_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if world.size > 1 else None
    checkpoint = resume_from(point, components, entered, datasets, rank, save_group)
    components.state.num_samples, components.state.blocks = datasets.num_samples, datasets.blocks
    length = _derive_length(entered, components, datasets.num_samples, world.size)
    evaluated = is_evaluated(components.state, length.length)
    recipe.evaluations = rank.main_decides(
        lambda: entered.folder.evaluations(components.state.step, evaluated=evaluated)
    )
    resume_remarks = [] if checkpoint is point.checkpoint else checkpoint.remarks
    return TrainingRun(
        rank=rank,
        entered=length.entered,
        run_id=point.run_id,
        batch=batch,
        datasets=datasets,
        components=components,
        checkpoint=checkpoint,
        start_step=components.state.step,
        length=length.length,
        save_group=save_group,
        work=work,
        advice=fitted.advice,
        remarks=[
            *fitted.remarks,
            *point.checkpoint.remarks,
            *batch_remarks,
            *datasets.remarks,
            *resume_remarks,
            *length.remarks,
        ],
    )


def _plan_batch(
    rank: RankContext,
    run: EnteredRun,
    checkpoint: Path | None,
    placement: Placement,
    requested_devices: int | None,
) -> tuple[BatchPlan, list[str]]:
    """Returns the batch of a step, and notes for the user; a resumed run keeps its effective batch."""
    settings, explicit = run.settings, run.resolved.explicit
    devices = len(placement.devices) if settings.parallel.strategy == "dp" else placement.data_world
    stored, known_to_fit = run.stored_batch, rank.main_decides(lambda: stored_size(run.folder.path)) or 0
    if checkpoint is not None:
        state = rank.main_decides(lambda: read_extra(checkpoint)["state"])
        stored = int(state["global_batch"])
        known_to_fit = min(filter(None, (known_to_fit, state.get("micro_batch", 0))), default=0)
    # Only the first rank of each machine counts its devices. In a new run, their number determines the effective batch.
    requested = rank.agreement.all_gather(requested_devices if rank.world.local_rank == 0 else 0)
    plan = plan_batch(
        settings.batch,
        explicit,
        devices=devices,
        requested_devices=None if None in requested else sum(filter(None, requested)) // placement.context,
        stored=stored,
    )
    plan = with_micro_batch(plan, settings.batch.micro_batch, known_to_fit, on_gpu=placement.device.type == "cuda")
    return plan, overruled(settings.batch, explicit, devices, stored)


@dataclass(frozen=True)
class _DerivedLength:
    length: Length
    entered: EnteredRun  # the run, with the settings that follow from its length
    remarks: list[str]


def _derive_length(entered: EnteredRun, components: Components, num_samples: int, world_size: int) -> _DerivedLength:
    """Derives the number of steps of the run, and the settings that follow from it."""
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
