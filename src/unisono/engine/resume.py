"""What a checkpoint of a run holds, and how a run takes it up again.

Tensors go by plain names: model.<weight>, ema.<weight>, optimizer.<weight>.<slot>; all else is JSON. A checkpoint knows
nothing of ranks or strategies, so it fits any of them.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.checkpoint.commit import check_usable
from unisono.checkpoint.find import list_steps, newest_valid, read_extra, validate
from unisono.checkpoint.load import describe, load
from unisono.checkpoint.manifest import CheckpointError, read_manifest
from unisono.engine.build import Parts
from unisono.engine.state import TrainState
from unisono.errors import UserError


@dataclass(frozen=True)
class Found:
    """The checkpoint to go on from; what was passed over on the way to it, and why; what else the user should know."""

    path: Path | None = None
    bad: dict[Path, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def tensors_of(parts: Parts) -> dict[str, Tensor]:
    """Every tensor that must survive, by its name in the checkpoint."""
    strategy = parts.strategy
    found = {f"model.{name}": tensor for name, tensor in strategy.tensors().items()}
    local = dict(strategy.parameters)
    for (name, slot), tensor in parts.updater.tensors().items():
        like_weight = tensor.shape == local[name].shape
        found[f"optimizer.{name}.{slot}"] = strategy.as_stored(name, tensor) if like_weight else tensor
    if parts.ema is not None:
        found |= {f"ema.{name}": strategy.as_stored(name, tensor) for name, tensor in parts.ema.tensors().items()}
    return found


def extra_of(parts: Parts) -> dict[str, Any]:
    """Everything else that must survive."""
    parts.state.loss_scale = parts.scale.to_json() if parts.scale is not None else None
    extra = {"state": parts.state.to_json(), "optimizer": parts.updater.to_json()}
    remembered = parts.recipe.remember()
    return extra if remembered is None else {**extra, "recipe": remembered}


def find_checkpoint(resume: str, folder: Path, recipe: str, run: str | None = None) -> Found:
    """The checkpoint to go on from. `run` is the id of the run in `folder`, where it has one."""
    checkpoints = folder / "checkpoints"
    check_usable(checkpoints)
    if resume == "never":
        if list_steps(checkpoints):
            raise UserError(
                f"resume never: {folder} already has checkpoints; choose another output_dir, or resume auto"
            )
        return Found()
    if resume != "auto":
        # It may be another run's: this one begins there.
        return Found(named_checkpoint(Path(resume), {"recipe": recipe}))
    path, skipped = newest_valid(checkpoints, {"recipe": recipe, "run": run}, _why_unusable)
    if path is None and list_steps(checkpoints):
        reasons = "; ".join(f"{bad.name}: {reason}" for bad, reason in skipped)
        raise UserError(
            f"no valid checkpoint is left in {checkpoints} ({reasons}); restore one, or use another output_dir"
        )
    return Found(path, dict(skipped), [f"{bad.name} skipped: {reason}" for bad, reason in skipped])


def run_id(record: Mapping[str, Any] | None, folder: Path, checkpoint: Path | None) -> str:
    """The id of the run in a folder: what its run.json says; else, where that was lost, its checkpoint; else a new one.

    It tells the run's checkpoints from those of other runs of the same recipe.
    """
    known = (record or {}).get("id")
    if known is None and record is None and checkpoint is not None and checkpoint.parent == folder / "checkpoints":
        known = read_manifest(checkpoint).identity.get("run")
    return known if isinstance(known, str) else uuid.uuid4().hex


def named_checkpoint(path: Path, identity: dict[str, Any]) -> Path:
    """The checkpoint that a user has named: it, or the newest one of a folder of them, or of a run's folder."""
    if not path.is_dir():
        raise UserError(f"resume: {path} is not a folder; give a checkpoint (…/checkpoints/step_…), auto or never")
    if (path / "checkpoints").is_dir():  # a run folder will do
        path = newest_valid(path / "checkpoints", identity, _why_unusable)[0] or path
    elif list_steps(path):  # so will a folder of checkpoints
        path = newest_valid(path, identity, _why_unusable)[0] or path
    reason = validate(path, identity=identity) or _why_unusable(path)
    if reason is not None:
        raise UserError(f"resume: {path} is not a valid checkpoint: {reason}")
    return path


def _why_unusable(path: Path) -> str | None:
    """Why a checkpoint whose bytes are as they were written cannot be one of a run."""
    try:
        _read_state(path)
        describe(path)
    except CheckpointError as error:
        return str(error)
    return None


def _read_state(path: Path) -> tuple[TrainState, dict[str, dict[str, Any]]]:
    """Where the run stood, and the optimizer's state that is not in tensors."""
    extra = read_extra(path)
    try:
        state, optimizer = TrainState.from_json(extra.get("state")), extra.get("optimizer")
    except CheckpointError as error:
        raise CheckpointError(f"state.json: {error}") from None
    if state.step != (step := read_manifest(path).step):
        raise CheckpointError(f"state.json is of step {state.step}, its manifest of step {step}")
    if not isinstance(optimizer, dict) or not all(isinstance(slots, dict) for slots in optimizer.values()):
        raise CheckpointError("state.json does not say how the optimizer stood")
    return state, optimizer


def restore(path: Path, parts: Parts, group: dist.ProcessGroup | None) -> None:
    """Fills weights, optimizer, average and state from a checkpoint of any number of ranks."""
    place = parts.strategy.place
    saved = describe(path)
    state, plain = _read_state(path)
    if unknown := sorted(plain.keys() - dict(parts.strategy.parameters)):
        raise CheckpointError(f"{path} cannot be loaded: its optimizer knows {unknown[0]!r}, the model does not")
    targets = tensors_of(parts)
    optimizer = _optimizer_targets(saved, parts, targets)
    targets |= {f"optimizer.{name}.{slot}": _stored(parts, name, tensor) for (name, slot), tensor in optimizer.items()}
    without_average = parts.ema is not None and not any(name.startswith("ema.") for name in saved)
    if without_average:  # the average was switched on later: it starts from the loaded weights
        targets = {name: tensor for name, tensor in targets.items() if not name.startswith("ema.")}
    unused = {name for name in saved if name.startswith("ema.") and parts.ema is None}  # it was switched off
    load(path, targets, group=group, world=place.world, unused=unused)
    parts.updater.restore(optimizer, plain)
    parts.strategy.weights_changed()
    if without_average and parts.ema is not None:
        parts.ema.restart()
    _take_up(parts, state)
    if "recipe" in (extra := read_extra(path)):
        parts.recipe.recall(extra["recipe"])


def _optimizer_targets(
    saved: Mapping[str, tuple[Sequence[int], torch.dtype]], parts: Parts, present: dict[str, Tensor]
) -> dict[tuple[str, str], Tensor]:
    """Room for optimizer state that the checkpoint has and this optimizer creates only in its first step."""
    room = {}
    for name, parameter in parts.strategy.parameters:
        prefix = f"optimizer.{name}."
        for key, (shape, dtype) in saved.items():
            if key.startswith(prefix) and key not in present and "." not in key.removeprefix(prefix):
                like_weight = tuple(shape) == tuple(parts.strategy.whole_shape(name))
                room[name, key.removeprefix(prefix)] = (
                    torch.zeros_like(parameter, dtype=dtype) if like_weight else torch.zeros(tuple(shape), dtype=dtype)
                )
    return room


def _stored(parts: Parts, name: str, tensor: Tensor) -> Tensor:
    like_weight = tensor.shape == dict(parts.strategy.parameters)[name].shape
    return parts.strategy.as_stored(name, tensor) if like_weight else tensor


def _take_up(parts: Parts, state: TrainState) -> None:
    for name, value in vars(state).items():
        setattr(parts.state, name, value)
    if parts.scale is not None and state.loss_scale is not None:
        parts.scale.load_json(state.loss_scale)
