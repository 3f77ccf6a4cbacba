"""Chooses the checkpoint that a run resumes from, once the model is built: its tensors must match the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from unisono.checkpoint.commit import read_best
from unisono.checkpoint.find import list_steps, newest_valid, validate
from unisono.checkpoint.manifest import CheckpointError, read_manifest
from unisono.checkpoint.pieces import pieces_of
from unisono.checkpoint.tensor_file import BadTensorFile
from unisono.engine.rank_context import RankContext
from unisono.engine.resume import ChosenCheckpoint, restore, why_incompatible, why_unusable
from unisono.engine.step.components import Components
from unisono.parallel.strategy import Strategy


def resume_from(
    chosen: ChosenCheckpoint,
    components: Components,
    folder: Path,
    identity: Mapping[str, Any],
    num_samples: int,
    *,
    rank: RankContext,
    group: dist.ProcessGroup | None,
) -> ChosenCheckpoint:
    """Restores `chosen`, or the newest older checkpoint that fits the model; returns the one it used, with new notes.

    `folder` holds the run's checkpoints, `identity` names the run, the dataset has `num_samples`. Every rank calls it.
    """
    used: ChosenCheckpoint = rank.main_decides(lambda: newest_compatible(chosen, folder, identity, components))
    path = used.path
    assert path is not None
    restore(path, components, group)
    best = rank.main_decides(lambda: read_best(folder))
    if best is not None and best["step"] <= components.state.step:  # the last evaluation comes after the last save
        components.state.best = best
    if components.state.num_samples not in (0, num_samples):
        used.remarks.append(
            f"the dataset had {components.state.num_samples:,} samples before and has {num_samples:,} now: "
            "the sample order differs from this step on, and samples that are held out now may have been trained on"
        )
    broken = sorted({name for names in rank.agreement.all_gather(not_finite(components.strategy)) for name in names})
    if broken:
        older = rank.main_decides(lambda: _newest_finite(folder, identity, read_manifest(path).step))
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        advice = f"to go back: --resume {older}" if older else "no older checkpoint is finite"
        used.remarks.append(f"{path.name} holds weights that are not finite ({broken[0]}{more}); {advice}")
    return used


def newest_compatible(
    chosen: ChosenCheckpoint, folder: Path, identity: Mapping[str, Any], components: Components
) -> ChosenCheckpoint:
    """Returns `chosen`, or the newest older checkpoint that fits if its tensors do not match the model.

    If an older checkpoint of the same run fits the model, the newer one is damaged. If none fits, the model has
    changed: then restore() fails with the difference, and no checkpoint is set aside.
    """
    path = chosen.path
    if path is None or path.parent != folder:  # the user named this path: use no other
        return ChosenCheckpoint(path, chosen.bad)
    if (reason := why_incompatible(path, components)) is None:
        return ChosenCheckpoint(path, chosen.bad)
    step = read_manifest(path).step
    older, skipped = newest_valid(
        folder, identity, lambda one: why_unusable(one) or why_incompatible(one, components), before=step
    )
    if older is None:
        return ChosenCheckpoint(path, chosen.bad)
    bad = {path: reason, **{one: why for one, why in skipped if one not in chosen.bad}}
    return ChosenCheckpoint(older, chosen.bad | bad, [f"{one.name} skipped: {why}" for one, why in bad.items()])


def not_finite(strategy: Strategy) -> list[str]:
    """Names of weights with nan or inf in this rank's part, and of buffers with nan (a mask may hold inf)."""
    weights = dict(strategy.model.named_parameters()).keys()
    local = {name: _local(tensor) for name, tensor in strategy.tensors().items()}
    filled = {name: tensor for name, tensor in local.items() if tensor.is_floating_point() and tensor.numel()}
    return [name for name, tensor in filled.items() if not _is_sound(tensor, is_weight=name in weights)]


def _newest_finite(folder: Path, identity: Mapping[str, Any], before: int) -> Path | None:
    """The newest checkpoint before a step that has no nan in its weights; reads tensor by tensor."""
    for step, path in reversed(list_steps(folder)):
        if step >= before or validate(path, deep=False, identity=identity) is not None:
            continue
        try:
            if all(_is_sound(tensor, is_weight=False) for tensor in _weights_in(path)):
                return path
        except (CheckpointError, BadTensorFile, OSError):
            continue
    return None


def _weights_in(path: Path) -> Iterator[Tensor]:
    for name, pieces in pieces_of(path).items():
        for piece in pieces:
            if name.startswith("model.") and piece.file.dtype(name).is_floating_point:
                yield piece.file.tensor(name)


def _is_sound(tensor: Tensor, *, is_weight: bool) -> bool:
    wrong = tensor.isfinite().logical_not() if is_weight else tensor.isnan()
    return not bool(wrong.any())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
