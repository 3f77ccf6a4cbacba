"""Chooses the checkpoint that a run resumes from: first by its files, then, once the model is built, by its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from unisono.checkpoint.commit import read_best
from unisono.checkpoint.contents import contents_of
from unisono.checkpoint.examination import Examination
from unisono.checkpoint.find import Damage, list_steps, newest_valid, validate
from unisono.checkpoint.manifest import CheckpointError, read_manifest
from unisono.checkpoint.tensor_file import BadTensorFile
from unisono.data.stream import is_stream
from unisono.engine.build.datasets import Datasets
from unisono.engine.rank_context import RankContext
from unisono.engine.resume import (
    ChosenCheckpoint,
    FileChecks,
    find_checkpoint,
    read_state,
    restore,
    run_id,
    streams_in,
    why_incompatible,
    why_unusable,
)
from unisono.engine.run_folder.enter import EnteredRun
from unisono.engine.step.components import Components
from unisono.parallel.strategy import Strategy, local_part


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to resume from, if any, and the id of the run."""

    checkpoint: ChosenCheckpoint
    run_id: str
    examination: Examination  # result of checking the checkpoint's files

    @property
    def path(self) -> Path | None:
        """The checkpoint's folder; None for a new run."""
        return self.checkpoint.path

    @property
    def step(self) -> int:
        """The step to resume from; 0 for a new run."""
        return 0 if self.path is None else read_manifest(self.path).step


def find_resume_point(rank: RankContext, run: EnteredRun) -> ResumePoint:
    """Finds the checkpoint to resume from; every rank calls it."""
    examination = Examination(rank.world.rank, rank.world.size, rank.agreement.all_gather)

    def find(damage: Damage) -> ChosenCheckpoint:
        checks = FileChecks(damage, examination.contents)
        return _find_checkpoint(run, checks, was_started_before=rank.world.started_before)

    checkpoint = rank.main_decides_with(examination.damage, find)
    identifier = rank.main_decides(lambda: run_id(run.record, run.folder.path, checkpoint.path))
    return ResumePoint(checkpoint, identifier, examination)


def _find_checkpoint(run: EnteredRun, checks: FileChecks, *, was_started_before: bool) -> ChosenCheckpoint:
    """Returns the checkpoint to continue from.

    `--resume PATH` names the checkpoint that a run begins with. Once the run has its own checkpoints, the same command
    continues from the newest of these checkpoints.
    """
    resume, folder, name = run.settings.run.resume, run.folder.path, run.recipe_name
    stored_id = (run.record or {}).get("id")
    has_begun = was_started_before or (resume in run.earlier_resumes and resume != "never")
    if resume != "auto" and has_begun and list_steps(run.checkpoints):
        chosen = find_checkpoint("auto", folder, name, stored_id, checks)
        chosen.remarks.append(f"this run has already continued from {resume}: resuming from its newest checkpoint")
        return chosen
    return find_checkpoint(run.resume_path, folder, name, stored_id, checks)


def resume_from(
    point: ResumePoint,
    components: Components,
    run: EnteredRun,
    datasets: Datasets,
    rank: RankContext,
    group: dist.ProcessGroup | None,
) -> ChosenCheckpoint:
    """Restores the checkpoint, or the newest older one that matches the model; returns it, with new notes.

    Every rank calls it, even if the run begins at step 0.
    """
    if point.path is None:
        return point.checkpoint
    folder, identity = run.checkpoints, {"recipe": run.recipe_name, "run": point.run_id}
    examination = point.examination

    def choose(damage: Damage) -> ChosenCheckpoint:
        checks = FileChecks(damage, examination.contents)
        return _newest_compatible(point.checkpoint, folder, identity, components, checks)

    used: ChosenCheckpoint = rank.main_decides_with(examination.damage, choose)
    path = used.path
    assert path is not None
    extra = rank.main_decides(lambda: read_state(path))
    parts = components.strategy.placement.data_world if is_stream(datasets.train) else None
    used = replace(used, streams=streams_in(extra, path, parts))
    restore(examination.contents(path), extra, components, group)
    best = rank.main_decides(lambda: read_best(folder))
    if best is not None and best["step"] <= components.state.step:  # the last evaluation comes after the last save
        components.state.best = best
    saved = components.state
    if saved.num_samples not in (0, datasets.num_samples):
        used.remarks.append(
            f"the dataset had {saved.num_samples:,} samples before and has {datasets.num_samples:,} now: "
            "the sample order differs from this step on, and samples that are held out now may have been trained on"
        )
    elif saved.blocks != datasets.blocks:
        used.remarks.append(
            "the sizes of the dataset's blocks (its shards or row groups) have changed: the sample order differs from "
            "this step on"
        )
    non_finite = sorted(
        {name for names in rank.agreement.all_gather(_not_finite(components.strategy)) for name in names}
    )
    if non_finite:
        older = rank.main_decides(lambda: _newest_finite(folder, identity, read_manifest(path).step))
        more = f" and {len(non_finite) - 1} more" if len(non_finite) > 1 else ""
        advice = f"to go back: --resume {older}" if older else "no older checkpoint is finite"
        used.remarks.append(f"{path.name} holds weights that are not finite ({non_finite[0]}{more}); {advice}")
    return used


def _newest_compatible(
    chosen: ChosenCheckpoint, folder: Path, identity: Mapping[str, Any], components: Components, checks: FileChecks
) -> ChosenCheckpoint:
    """Returns `chosen`, or the newest older checkpoint that matches the model if its own tensors do not.

    If an older checkpoint of the same run matches, the newer one is damaged. If none matches, the model has changed:
    restore() then reports the difference, and no checkpoint is set aside.
    """
    path = chosen.path
    if path is None or path.parent != folder:  # the user chose this checkpoint, so no other is used
        return ChosenCheckpoint(path, chosen.bad)
    if (reason := why_incompatible(checks.contents(path), components)) is None:
        return ChosenCheckpoint(path, chosen.bad)
    step = read_manifest(path).step

    def why_not(each: Path) -> str | None:
        return why_unusable(each, checks.contents) or why_incompatible(checks.contents(each), components)

    older, skipped = newest_valid(folder, identity, why_not, before=step, damage=checks.damage)
    if older is None:
        return ChosenCheckpoint(path, chosen.bad)
    bad = {path: reason, **{each: why for each, why in skipped if each not in chosen.bad}}
    return ChosenCheckpoint(older, chosen.bad | bad, [f"{each.name} skipped: {why}" for each, why in bad.items()])


def _not_finite(strategy: Strategy) -> list[str]:
    """Returns the names of this rank's weights with nan or inf, and of buffers with nan (a mask may hold inf)."""
    weights = dict(strategy.model.named_parameters()).keys()
    local = {name: local_part(tensor) for name, tensor in strategy.tensors().items()}
    floating = {name: tensor for name, tensor in local.items() if tensor.is_floating_point() and tensor.numel()}
    return [name for name, tensor in floating.items() if not _is_finite(tensor, is_weight=name in weights)]


def _newest_finite(folder: Path, identity: Mapping[str, Any], before: int) -> Path | None:
    """Returns the newest checkpoint before step `before` with finite weights, if any; reads one tensor at a time."""
    for step, path in reversed(list_steps(folder)):
        if step >= before or validate(path, deep=False, identity=identity) is not None:
            continue
        try:
            if all(_is_finite(tensor, is_weight=False) for tensor in _weights_in(path)):
                return path
        except (CheckpointError, BadTensorFile, OSError):
            continue
    return None


def _weights_in(path: Path) -> Iterator[Tensor]:
    for name, pieces in contents_of(path).pieces.items():
        for piece in pieces:
            if name.startswith("model.") and piece.file.dtype(name).is_floating_point:
                yield piece.file.tensor(name)


def _is_finite(tensor: Tensor, *, is_weight: bool) -> bool:
    wrong = tensor.isfinite().logical_not() if is_weight else tensor.isnan()
    return not bool(wrong.any())
