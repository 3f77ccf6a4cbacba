"""What a checkpoint of a run holds, and how a run takes it up again.

Tensors go by plain names: model.<weight>, ema.<weight>, optimizer.<weight>.<slot>; all else is JSON. A checkpoint knows
nothing of ranks or strategies, so it fits any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.checkpoint.find import list_steps, newest_valid, read_extra, validate
from unisono.checkpoint.load import describe, load
from unisono.engine.build import Parts
from unisono.engine.state import TrainState
from unisono.errors import UserError


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
    return {"state": parts.state.to_json(), "optimizer": parts.updater.to_json()}


def find_checkpoint(resume: str, folder: Path, recipe: str) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, and what was passed over and why."""
    checkpoints = folder / "checkpoints"
    identity = {"recipe": recipe}
    if resume == "never":
        if list_steps(checkpoints):
            raise UserError(
                f"resume never: {folder} already has checkpoints; choose another output_dir, or resume auto"
            )
        return None, []
    if resume != "auto":
        return _named(Path(resume), identity)
    path, skipped = newest_valid(checkpoints, identity)
    if path is None and list_steps(checkpoints):
        reasons = "; ".join(f"{bad.name}: {reason}" for bad, reason in skipped)
        raise UserError(
            f"no valid checkpoint is left in {checkpoints} ({reasons}); restore one, or use another output_dir"
        )
    return path, [f"{bad.name} skipped: {reason}" for bad, reason in skipped]


def _named(path: Path, identity: dict[str, Any]) -> tuple[Path | None, list[str]]:
    if not path.is_dir():
        raise UserError(f"resume: {path} is not a folder; give a checkpoint (…/checkpoints/step_…), auto or never")
    if (path / "checkpoints").is_dir():  # a run folder will do
        path = newest_valid(path / "checkpoints", identity)[0] or path
    reason = validate(path, identity=identity)
    if reason is not None:
        raise UserError(f"resume: {path} is not a valid checkpoint: {reason}")
    return path, []


def restore(path: Path, parts: Parts, group: dist.ProcessGroup | None) -> None:
    """Fills weights, optimizer, average and state from a checkpoint of any number of ranks."""
    place = parts.strategy.place
    saved = describe(path)
    extra = read_extra(path)
    targets = tensors_of(parts)
    optimizer = _optimizer_targets(saved, parts, targets)
    targets |= {f"optimizer.{name}.{slot}": _stored(parts, name, tensor) for (name, slot), tensor in optimizer.items()}
    without_average = parts.ema is not None and not any(name.startswith("ema.") for name in saved)
    if without_average:  # the average was switched on later: it starts from the loaded weights
        targets = {name: tensor for name, tensor in targets.items() if not name.startswith("ema.")}
    unused = {name for name in saved if name.startswith("ema.") and parts.ema is None}  # it was switched off
    load(path, targets, group=group, world=place.world, unused=unused)
    parts.updater.restore(optimizer, extra["optimizer"])
    parts.strategy.weights_changed()
    if without_average and parts.ema is not None:
        parts.ema.restart()
    _take_up(parts, TrainState.from_json(extra["state"]))


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
