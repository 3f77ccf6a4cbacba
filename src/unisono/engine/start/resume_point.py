"""Where a start begins: at step 0 or at a checkpoint, and with which effective batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unisono.checkpoint.find import list_steps, read_extra
from unisono.checkpoint.manifest import read_manifest
from unisono.engine.batch import BatchPlan, overruled, plan_batch, with_micro_batch
from unisono.engine.memory.remembered_size import remembered
from unisono.engine.rank_context import RankContext
from unisono.engine.resume import ChosenCheckpoint, find_checkpoint, run_id
from unisono.engine.run_folder.enter import EnteredRun
from unisono.parallel.strategy import Placement


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a start continues from, if any, and the id of the run."""

    checkpoint: ChosenCheckpoint
    run_id: str

    @property
    def path(self) -> Path | None:
        """The checkpoint's folder; None for a new run."""
        return self.checkpoint.path

    @property
    def step(self) -> int:
        """The step at which the start begins."""
        return 0 if self.path is None else read_manifest(self.path).step


@dataclass(frozen=True)
class PlannedBatch:
    """The batch of every optimizer step, and what the user should know about it."""

    plan: BatchPlan
    remarks: list[str]


def find_resume_point(rank: RankContext, run: EnteredRun) -> ResumePoint:
    """Finds the checkpoint to continue from; every rank calls it."""
    checkpoint = rank.main_decides(lambda: _find_checkpoint(run, was_started_before=rank.world.started_before))
    return ResumePoint(checkpoint, rank.main_decides(lambda: run_id(run.record, run.folder.path, checkpoint.path)))


def plan_run_batch(
    rank: RankContext,
    run: EnteredRun,
    checkpoint: Path | None,
    placement: Placement,
    *,
    requested_devices: int | None,
) -> PlannedBatch:
    """Plans the batch of a step; a run that continues keeps its effective batch. Every rank calls it."""
    settings, explicit = run.settings, run.resolved.explicit
    devices = len(placement.devices) if settings.parallel.strategy == "dp" else rank.world.size
    stored, known_to_fit = run.stored_batch, rank.main_decides(lambda: remembered(run.folder.path)) or 0
    if checkpoint is not None:
        state = rank.main_decides(lambda: read_extra(checkpoint)["state"])
        stored = int(state["global_batch"])
        known_to_fit = min(filter(None, (known_to_fit, state.get("micro_batch", 0))), default=0)
    # The first rank of each machine answers for it: a new run's batch follows from the machines at its first start.
    requested = rank.agreement.all_gather(requested_devices if rank.world.local_rank == 0 else 0)
    plan = plan_batch(
        settings.batch,
        explicit,
        devices=devices,
        requested_devices=None if None in requested else sum(filter(None, requested)),
        stored=stored,
    )
    on_gpu = placement.device.type == "cuda"
    return PlannedBatch(
        with_micro_batch(plan, settings.batch.micro_batch, known_to_fit, on_gpu=on_gpu),
        overruled(settings.batch, explicit, devices, stored),
    )


def _find_checkpoint(run: EnteredRun, *, was_started_before: bool) -> ChosenCheckpoint:
    """The checkpoint to continue from.

    `--resume PATH` names where a run begins. Once the run has checkpoints of its own, the same command continues from
    the newest of those.
    """
    resume, folder, name = run.settings.run.resume, run.folder.path, run.recipe_name
    stored_id = (run.record or {}).get("id")
    has_begun = was_started_before or (resume in run.earlier_resumes and resume != "never")
    if resume != "auto" and has_begun and list_steps(run.checkpoints):
        chosen = find_checkpoint("auto", folder, name, stored_id)
        chosen.remarks.append(f"this run has already continued from {resume}: resuming from its newest checkpoint")
        return chosen
    return find_checkpoint(resume, folder, name, stored_id)
