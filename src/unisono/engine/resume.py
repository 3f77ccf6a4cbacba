"""Defines the contents of a checkpoint, and restores a run from it.

Tensors have plain names: model.<weight>, ema.<weight>, optimizer.<weight>.<slot>; everything else is JSON. A checkpoint
does not depend on ranks or strategies, so a run can resume on any number of ranks, under any strategy.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.checkpoint.aside import remark_on_asides
from unisono.checkpoint.commit import check_usable
from unisono.checkpoint.contents import Contents
from unisono.checkpoint.examination import Examination
from unisono.checkpoint.find import Damage, list_steps, newest_valid, read_extra, validate
from unisono.checkpoint.load import difference, load
from unisono.checkpoint.manifest import CheckpointError, read_manifest
from unisono.checkpoint.pickles import how_to_convert, is_pickle
from unisono.checkpoint.snapshot import shapes_of
from unisono.data.stream import StreamPosition
from unisono.engine.recipe import Recipe
from unisono.engine.state import TrainState
from unisono.engine.step.components import Components, TrainedGroup
from unisono.engine.step.optimizer_wrapper import OptimizerWrapper
from unisono.errors import RecipeError, UserError
from unisono.formatting import format_count
from unisono.parallel.strategy import Strategy


@dataclass(frozen=True)
class ChosenCheckpoint:
    """The checkpoint to resume from, newer checkpoints that cannot be used, and notes for the user."""

    path: Path | None = None  # None: start at step 0
    bad: dict[Path, str] = field(default_factory=dict)  # checkpoints that cannot be used -> reason
    remarks: list[str] = field(default_factory=list)
    streams: list[StreamPosition] | None = None  # positions of the ranks' streams, if the data is a stream


def tensors_of(components: Components) -> dict[str, Tensor]:
    """Returns every tensor that a checkpoint stores, by its name there."""
    strategy, groups = components.strategy, components.groups
    tensors = {f"model.{name}": tensor for name, tensor in strategy.tensors().items()}
    for group in groups:
        tensors |= _optimizer_tensors(strategy, group.optimizer, group.optimizer.tensors())
    averages = [group.ema.tensors() for group in groups if group.ema is not None]
    for average in averages:
        tensors |= {f"ema.{name}": strategy.as_stored(name, tensor) for name, tensor in average.items()}
    return tensors


def _optimizer_tensors(
    strategy: Strategy, optimizer: OptimizerWrapper, tensors: Mapping[tuple[str, str], Tensor]
) -> dict[str, Tensor]:
    return {
        f"optimizer.{name}.{slot}": strategy.as_stored(name, tensor, by_rows=optimizer.is_by_rows(slot))
        for (name, slot), tensor in tensors.items()
    }


def remembered_by(recipe: Recipe) -> Any:
    """Returns the value of remember(); rejects a value that is not JSON. The trainer also calls it before step 1."""
    value = recipe.remember()
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(
            f"remember() returned a value that JSON cannot hold ({error}); return numbers, strings, lists and dicts"
        ) from error
    return value


def extra_of(components: Components) -> dict[str, Any]:
    """Returns everything else that a checkpoint stores, as JSON."""
    plain: dict[str, Any] = {}
    for group in components.groups:
        group.state.loss_scale = group.scale.to_json() if group.scale is not None else None
        plain |= group.optimizer.to_json()
    extra = {"state": components.state.to_json(), "optimizer": plain, "optimizer_class": _optimizer_class(components)}
    remembered = remembered_by(components.recipe)
    return extra if remembered is None else {**extra, "recipe": remembered}


def _optimizer_class(components: Components) -> str | dict[str, str]:
    """Returns the class of the optimizer, or the classes of the groups' optimizers by group name."""
    if components.groups[0].declared is None:
        return components.groups[0].optimizer.class_name
    return {group.name: group.optimizer.class_name for group in components.groups}


@dataclass(frozen=True)
class FileChecks:
    """Functions that examine the files of checkpoints, in this process alone or on all ranks together."""

    damage: Damage
    contents: Callable[[Path], Contents]  # reads the contents of a checkpoint whose files are undamaged

    @classmethod
    def local(cls) -> FileChecks:
        """Returns functions that examine files in this process alone."""
        examination = Examination()
        return cls(examination.damage, examination.contents)


def find_checkpoint(
    resume: str, folder: Path, recipe: str, run: str | None = None, checks: FileChecks | None = None
) -> ChosenCheckpoint:
    """Chooses the checkpoint to resume from. `run` is the id of the run in `folder`, if it has one."""
    checks = checks or FileChecks.local()
    checkpoints = folder / "checkpoints"
    check_usable(checkpoints)
    remarks = [remark] if (remark := remark_on_asides(checkpoints)) is not None else []
    if resume == "never":
        if list_steps(checkpoints):
            raise UserError(
                f"resume never: {folder} already has checkpoints; choose another output_dir, or resume auto"
            )
        return ChosenCheckpoint(remarks=remarks)
    if resume != "auto":
        # The checkpoint may belong to another run, from which this run branches off.
        return ChosenCheckpoint(named_checkpoint(Path(resume), {"recipe": recipe}, checks), remarks=remarks)
    path, skipped = newest_usable(checkpoints, {"recipe": recipe, "run": run}, checks)
    if path is None and list_steps(checkpoints):
        reasons = "; ".join(f"{bad.name}: {reason}" for bad, reason in skipped)
        raise UserError(
            f"no valid checkpoint is left in {checkpoints} ({reasons}); restore one, or use another output_dir"
        )
    return ChosenCheckpoint(
        path, dict(skipped), [*(f"{bad.name} skipped: {reason}" for bad, reason in skipped), *remarks]
    )


def run_id(record: Mapping[str, Any] | None, folder: Path, checkpoint: Path | None) -> str:
    """Returns the id of the run in a folder: from run.json, or from its checkpoint if run.json is lost, or a new id.

    The id distinguishes the run's checkpoints from those of other runs of the same recipe.
    """
    stored = (record or {}).get("id")
    if stored is None and record is None and checkpoint is not None and checkpoint.parent == folder / "checkpoints":
        stored = read_manifest(checkpoint).identity.get("run")
    return stored if isinstance(stored, str) else uuid.uuid4().hex


def newest_usable(
    folder: Path, identity: Mapping[str, Any], checks: FileChecks
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Returns the newest valid checkpoint of a run, and (path, reason) of each newer checkpoint that was skipped."""
    return newest_valid(folder, identity, lambda path: why_unusable(path, checks.contents), damage=checks.damage)


def named_checkpoint(path: Path, identity: dict[str, Any], checks: FileChecks | None = None) -> Path:
    """Returns the checkpoint at a path that the user named: the path itself, or the newest in that folder or run."""
    checks = checks or FileChecks.local()
    if is_pickle(path):
        raise UserError(
            f"resume: {how_to_convert(path)} (and load the new file in the recipe's model(); a run resumes only from "
            "unisono's checkpoints)"
        )
    if not path.is_dir():
        raise UserError(f"resume: {path} is not a folder; pass a checkpoint (…/checkpoints/step_…), auto or never")
    newest = None
    if (path / "checkpoints").is_dir():  # a run folder
        newest = newest_usable(path / "checkpoints", identity, checks)[0]
    elif list_steps(path):  # a folder of checkpoints
        newest = newest_usable(path, identity, checks)[0]
    if newest is not None:
        return newest
    reason = validate(path, identity=identity, damage=checks.damage) or why_unusable(path, checks.contents)
    if reason is not None:
        raise UserError(f"resume: {path} is not a valid checkpoint: {reason}")
    return path


def why_unusable(path: Path, contents: Callable[[Path], Contents]) -> str | None:
    """Returns the reason why a run cannot resume from a checkpoint whose files are undamaged; None if it can."""
    try:
        read_state(path)
        contents(path)
    except CheckpointError as error:
        return str(error)
    return None


def read_state(path: Path) -> dict[str, Any]:
    """Returns a checkpoint's data other than tensors; raises CheckpointError if it is no run's state at that step."""
    extra = read_extra(path)
    state, _ = _state_in(extra)
    if state.step != (step := read_manifest(path).step):
        raise CheckpointError(f"state.json says step {state.step}, but its manifest says step {step}")
    return extra


def _state_in(extra: Mapping[str, Any]) -> tuple[TrainState, dict[str, dict[str, Any]]]:
    """Returns the training state, and the optimizer state that is not in tensors."""
    try:
        state, optimizer = TrainState.from_json(extra.get("state")), extra.get("optimizer")
    except CheckpointError as error:
        raise CheckpointError(f"state.json: {error}") from None
    if not isinstance(optimizer, dict) or not all(isinstance(slots, dict) for slots in optimizer.values()):
        raise CheckpointError("state.json lacks the optimizer's state")
    return state, optimizer


def why_incompatible(contents: Contents, components: Components) -> str | None:
    """Returns why a checkpoint does not fit the model, according to its file headers and state; None if it fits."""
    try:
        extra = read_state(contents.path)
        if _state_in(extra)[0].global_batch != components.state.global_batch:
            return "its effective batch differs from this run's"
        targets = _Targets(contents, extra, components)
    except CheckpointError as error:
        return str(error)
    return difference(targets.saved, shapes_of(targets.tensors))


def restore(
    contents: Contents, extra: Mapping[str, Any], components: Components, group: dist.ProcessGroup | None
) -> None:
    """Restores weights, optimizer, average and state from a checkpoint, saved by any number of ranks.

    `extra` is the result of `read_state`.
    """
    targets = _Targets(contents, extra, components)
    world = components.strategy.placement.world
    load(contents.path, targets.tensors, group=group, world=world, unused=targets.unused, contents=contents)
    for trained in components.groups:
        trained.optimizer.restore(targets.optimizer, targets.plain)
    components.strategy.weights_changed()
    for trained in targets.without_average:
        assert trained.ema is not None
        trained.ema.restart()
    _restore_state(components, targets.state)
    if "recipe" in extra:
        components.recipe.recall(extra["recipe"])


def streams_in(extra: Mapping[str, Any], path: Path, parts: int | None) -> list[StreamPosition] | None:
    """Returns the positions of all streams in a checkpoint; `parts`: number of streams that the run reads, or None."""
    stored = extra.get("streams")
    if parts is None:
        if stored is not None:
            raise CheckpointError(
                f'{path} was saved with a stream as dataset("train"), so a dataset that is read by index cannot '
                "continue it; return the stream again, or start a new run in another output_dir"
            )
        return None
    if not isinstance(stored, list):
        raise CheckpointError(
            f'{path} does not store the position of a stream, so dataset("train") must be the one that is read by '
            "index again; or start a new run in another output_dir"
        )
    if len(stored) != parts:
        raise CheckpointError(
            f"{path} was saved by {format_count(len(stored), 'rank')} with a stream each, and this run has {parts}: "
            f"the samples of a stream cannot be divided anew; use {format_count(len(stored), 'rank')}, or a map-style "
            "dataset (unisono.datasets), which resumes on any number"
        )
    try:
        return [StreamPosition.from_json(position) for position in stored]
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be loaded: state.json, streams: {error}") from None


class _Targets:
    """The contents of a checkpoint, and the tensors of this run to load them into."""

    def __init__(self, contents: Contents, extra: Mapping[str, Any], components: Components) -> None:
        path, everything = contents.path, contents.shapes
        self.state, self.plain = _state_in(extra)
        _check_rhythm(path, self.state, components)
        _check_optimizer_class(path, extra, _optimizer_class(components))
        present = tensors_of(components)
        self.tensors = dict(present)
        self.optimizer: dict[tuple[str, str], Tensor] = {}
        for optimizer in [group.optimizer for group in components.groups]:
            if not optimizer.has_all_state:
                missing = _missing_optimizer_state(everything, components.strategy, present, optimizer)
                self.tensors |= _optimizer_tensors(components.strategy, optimizer, missing)
                self.optimizer |= missing
        _check_plain(path, self.plain, components, everything)
        # An average that was enabled after this checkpoint starts from the loaded weights.
        self.without_average: list[TrainedGroup] = []
        averaged: set[str] = set()
        for group in components.groups:
            names = set() if group.ema is None else {f"ema.{name}" for name in group.ema.tensors()}
            averaged |= names
            if names and not names & everything.keys():
                self.without_average.append(group)
                self.tensors = {name: tensor for name, tensor in self.tensors.items() if name not in names}
        # Ignore the tensors of an average that was disabled after this checkpoint.
        disabled = {f"ema.{name}" for name, _ in components.strategy.parameters} - averaged
        self.unused = {name for name in everything if name in disabled or (name.startswith("ema.") and not averaged)}
        self.saved = {name: shape for name, shape in everything.items() if name not in self.unused}


def _check_rhythm(path: Path, state: TrainState, components: Components) -> None:
    """Rejects a checkpoint whose groups, or whose numbers of steps per group, differ from this run's."""
    saved = {name: group.steps for name, group in state.groups.items()}
    here = {name: group.steps for name, group in components.state.groups.items()}
    if list(saved.items()) != list(here.items()):
        raise CheckpointError(
            f"{path} cannot be loaded: it trained {_rhythm(saved)}, and this run trains {_rhythm(here)}; keep the "
            "names, order and steps of groups(), or start a new run in another output_dir"
        )


def _rhythm(groups: Mapping[str, int]) -> str:
    named = ", ".join(f"{name} for {steps} step{'s' * (steps > 1)}" for name, steps in groups.items())
    return f"in turn {named}" if named else "all weights together"


def _check_optimizer_class(path: Path, extra: Mapping[str, Any], here: str | dict[str, str]) -> None:
    """Rejects the state of another optimizer. A recipe's optimizer() may return another class than before."""
    saved = extra.get("optimizer_class", here)  # older checkpoints do not store the class
    classes = saved if isinstance(saved, dict) else {"": saved}
    ours = here if isinstance(here, dict) else {"": here}
    if classes.keys() != ours.keys() or not all(isinstance(each, str) for each in classes.values()):
        raise CheckpointError(f"{path} cannot be loaded: state.json names no class of optimizers")
    for name, class_name in classes.items():
        if class_name != ours[name]:
            of_group = f" for {name}" if name else ""
            raise CheckpointError(
                f"{path} has the state of the optimizer {class_name}{of_group}, but this run uses {ours[name]}; use "
                f"{class_name} again, or start a new run in another output_dir"
            )


def _check_plain(path: Path, plain: dict[str, dict[str, Any]], components: Components, saved: Collection[str]) -> None:
    """Rejects non-tensor optimizer state that the optimizer cannot use."""
    if unknown := sorted(plain.keys() - dict(components.strategy.parameters)):
        raise CheckpointError(
            f"{path} cannot be loaded: its optimizer has state of {unknown[0]!r}, which is not in the model"
        )
    here = {key for group in components.groups for key in group.optimizer.tensors()}
    for name, slots in plain.items():
        for slot, value in slots.items():
            is_tensor = (name, slot) in here or f"optimizer.{name}.{slot}" in saved
            if is_tensor or isinstance(value, str | dict):
                raise CheckpointError(
                    f"{path} cannot be loaded: the optimizer state {slot!r} of {name!r} has the wrong type"
                )


def _missing_optimizer_state(
    saved: Mapping[str, tuple[Sequence[int], torch.dtype]],
    strategy: Strategy,
    present: Collection[str],
    optimizer: OptimizerWrapper,
) -> dict[tuple[str, str], Tensor]:
    """Returns empty tensors for saved optimizer state that this optimizer would create only in its first step."""
    parameters = {name: parameter for name, parameter in strategy.parameters if optimizer.is_of(parameter)}
    targets = {}
    for key, (shape, dtype) in saved.items():
        name, _, slot = key.removeprefix("optimizer.").rpartition(".")
        if key.startswith("optimizer.") and key not in present and name in parameters:
            like_weight = tuple(shape) == tuple(strategy.whole_shape(name))
            targets[name, slot] = (
                torch.zeros_like(parameters[name], dtype=dtype) if like_weight else torch.zeros(shape, dtype=dtype)
            )
    return targets


def _restore_state(components: Components, state: TrainState) -> None:
    for name, value in vars(state).items():
        if name != "groups":
            setattr(components.state, name, value)
    for name, saved in state.groups.items():  # update in place, because the groups refer to these objects
        vars(components.state.groups[name]).update(vars(saved))
    for group in components.groups:
        if group.scale is not None and group.state.loss_scale is not None:
            group.scale.load_json(group.state.loss_scale)
