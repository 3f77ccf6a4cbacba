"""From a run's folder to a trained model, and from there to the recipe's own format."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from unisono.checkpoint.commit import read_best
from unisono.checkpoint.find import is_step, list_steps, newest_valid, step_folder, validate
from unisono.checkpoint.load import describe, load_whole
from unisono.checkpoint.manifest import CheckpointError
from unisono.checkpoint.tensor_file import BadTensorFile
from unisono.checkpoint.together import RanksFailed
from unisono.config.resolve import Resolved
from unisono.engine.recipe import Recipe
from unisono.engine.start.registry import load_recipe
from unisono.errors import UserError
from unisono.observe.folder import RunFolder
from unisono.parallel.materialize import Weights, fill, materialize
from unisono.parallel.strategy import cast_weights
from unisono.settings import Settings

_PATIENCE_S = 60.0  # for a checkpoint that stays until it is read


def export_run(
    run: Path, folder: Path, *, step: str | None = None, weights: str = "auto", words: str | None = None
) -> str:
    """Writes the weights of a run's checkpoint to `folder`; returns what it wrote, in words."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give a folder to export to")
    recipe, model, what = load_trained(run, step=step, weights=weights, words=words, keep_dtype=True)
    try:
        with _whole_or_not_at_all(folder):
            recipe.export(model, folder)
            _share(folder)
    except (OSError, SafetensorError) as error:  # which is what a full disk is to that library
        told = getattr(error, "strerror", None) or error
        raise UserError(f"{folder} cannot be written ({told}); make room, or export to another folder") from None
    return what


@contextmanager
def _whole_or_not_at_all(folder: Path) -> Iterator[None]:
    """Makes the folder; if what is written to it fails, removes that again. What was there before stays."""
    was_there = folder.is_dir()
    before = {path.name for path in folder.iterdir()} if was_there else set()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with suppress(OSError):
            for path in [path for path in folder.iterdir() if path.name not in before]:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            if not was_there:
                folder.rmdir()
        raise


def _share(folder: Path) -> None:
    """Weights as readable as other files: safetensors writes them for the owner alone."""
    os.umask(hidden := os.umask(0))
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o666 & ~hidden)


def load_trained(
    run: Path,
    *,
    step: str | None = None,
    weights: str = "auto",
    words: str | None = None,
    keep_dtype: bool = False,
) -> tuple[Recipe, nn.Module, str]:
    """The recipe and the trained model of a run, on the CPU, and which weights they are.

    With `keep_dtype` a model that was trained in float64 stays in it; otherwise it is as the recipe builds it.
    """
    record = RunFolder.read(run)
    if record is None:
        raise UserError(f"{run} is not a run's folder (no run.json)")
    kind = load_recipe(words or _recipe_named_in(record, run))
    if not all(isinstance(record.get(name), dict) for name in ("config", "sources")):
        raise UserError(f"{run}: run.json does not say how the run was configured; it is damaged")
    resolved = Resolved.from_json((Settings, kind.Config), {"values": record["config"], "sources": record["sources"]})
    # Before the model is built, which may take long: a run that is still training may delete the checkpoint meanwhile.
    checkpoint, state, averaged = _read_checkpoint(run, step, {"recipe": record["recipe"]}, weights)
    recipe = kind(resolved.build(kind.Config))
    recipe.prepared = run / "prepared"
    model = recipe.model()
    elsewhere = recipe.weights(model)
    if elsewhere is None:
        materialize(model, resolved.values["seed"])
    else:
        fill(model, _Saved(state, elsewhere))
    if keep_dtype and resolved.values["dtype"] == "float64":
        cast_weights(model, torch.float64)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    _fill(model, state, not_saved=set() if elsewhere is None else frozen)
    return recipe, model.eval(), f"{'averaged ' if averaged else ''}weights of {checkpoint.name}"


def _read_checkpoint(
    run: Path, step: str | None, identity: dict[str, Any], weights: str
) -> tuple[Path, dict[str, Tensor], bool]:
    """The checkpoint to export, its weights by name, and whether they are averaged.

    A run that is still training deletes older checkpoints: one that vanishes while it is read is replaced by the one
    that is the newest by then.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        seen = list_steps(run / "checkpoints")
        checkpoint: Path | None = None
        try:
            checkpoint = _checkpoint(run, step, identity)
            state, averaged = _weights_of(checkpoint, weights)
            if checkpoint.is_dir():  # it has been there all the time
                return checkpoint, state, averaged
            failure: Exception = CheckpointError(f"{checkpoint} was deleted while it was read")
        except (UserError, RanksFailed, BadTensorFile, OSError) as error:
            failure = error
        vanished = not checkpoint.is_dir() if checkpoint else seen != list_steps(run / "checkpoints")
        is_fixed = step is not None and is_step(step)
        if vanished and not is_fixed and time.monotonic() < deadline:
            continue
        if vanished and checkpoint is not None:
            raise UserError(f"{checkpoint} was deleted while it was read; export another step, or raise keep_last")
        if isinstance(failure, UserError):
            raise failure
        raise UserError(f"{checkpoint} cannot be read ({failure}); export another step") from None


def _weights_of(checkpoint: Path, weights: str) -> tuple[dict[str, Tensor], bool]:
    has_average = any(name.startswith("ema.") for name in describe(checkpoint))
    if weights == "ema" and not has_average:
        raise UserError(f"{checkpoint} has no moving average; train with --ema_decay, or export --weights model")
    state = load_whole(checkpoint, "model.")
    averaged = weights != "model" and has_average
    return (state | load_whole(checkpoint, "ema.") if averaged else state), averaged


class _Saved:
    """The weights in a checkpoint; those that were not trained come from where they came from before."""

    def __init__(self, state: Mapping[str, Tensor], elsewhere: Weights) -> None:
        self._state, self._elsewhere = state, elsewhere

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """The rows of a weight."""
        saved = self._state.get(name)
        return self._elsewhere.rows(name, start, stop) if saved is None else saved[start:stop]


def _recipe_named_in(record: dict[str, Any], run: Path) -> str:
    words = record.get("recipe_from")
    if not isinstance(words, str):
        raise UserError(f"{run} does not say where its recipe {record['recipe']} is; give --recipe file.py:Class")
    # run.json is data: it may name the user's recipe, but not bring code of its own along.
    if any(path.resolve().is_relative_to(run.resolve()) for path in _places(words.rpartition(":")[0])):
        raise UserError(f"{run} names a recipe inside itself ({words}); give --recipe file.py:Class if you trust it")
    return words


def _places(name: str) -> Iterator[Path]:
    """Where a recipe's file, or a module and the packages around it, would be looked for."""
    yield Path(name)
    parts = name.split(".")
    for folder in {*sys.path, "", os.getcwd()}:
        for number in range(1, len(parts) + 1):
            place = Path(folder, *parts[:number])
            yield from (place, place.with_name(f"{place.name}.py"))


def _checkpoint(run: Path, step: str | None, identity: dict[str, Any]) -> Path:
    checkpoints = run / "checkpoints"
    if step in (None, "newest"):
        path, skipped = newest_valid(checkpoints, identity)
        if path is None:
            reasons = "; ".join(f"{bad.name}: {reason}" for bad, reason in skipped) or "none was saved"
            raise UserError(f"{run} has no valid checkpoint ({reasons})")
        return path
    assert step is not None
    if step == "best":
        best = read_best(checkpoints)
        if best is None:
            raise UserError(f"{run} has no best checkpoint; train with --best_metric, or export another step")
        step = str(best["step"])
    if not is_step(step):
        raise UserError(f"--step {step}: expected a number, newest or best")
    path = checkpoints / step_folder(int(step))
    reason = validate(path, identity=identity)
    if reason is not None:
        raise UserError(f"{path} is not a valid checkpoint: {reason}")
    return path


def _fill(model: nn.Module, state: dict[str, Tensor], not_saved: set[str]) -> None:
    own = model.state_dict()
    saved = {name: tensor.to(own[name].dtype) if name in own else tensor for name, tensor in state.items()}
    try:
        missing, unexpected = model.load_state_dict(saved, strict=False)
    except RuntimeError as error:  # other sizes
        raise UserError(
            f"the checkpoint does not fit the recipe's model: {' '.join(str(error).split())[:300]}"
        ) from None
    filled = {own[name].data_ptr() for name in saved if name in own}
    # Tied weights stand under one name.
    lacking = [name for name in missing if own[name].data_ptr() not in filled and name not in not_saved]
    if lacking or unexpected:
        raise UserError(f"the checkpoint does not fit the recipe's model: {', '.join([*lacking, *unexpected][:3])}")
