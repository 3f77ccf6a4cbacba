"""Loads the trained model of a run, and writes it in the recipe's own format."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from unisono.checkpoint.all_ranks import RanksFailed
from unisono.checkpoint.commit import read_best
from unisono.checkpoint.contents import describe
from unisono.checkpoint.find import is_step, list_steps, newest_valid, step_folder, validate
from unisono.checkpoint.load import load_whole
from unisono.checkpoint.manifest import CheckpointError
from unisono.checkpoint.tensor_file import BadTensorFile
from unisono.engine.recipe import Recipe
from unisono.engine.run_folder.stored_settings import settings_in
from unisono.engine.start.registry import load_recipe
from unisono.errors import UserError
from unisono.observe.folder import RunFolder
from unisono.parallel.blocks.repeated import repeated_blocks
from unisono.parallel.materialize import Weights, fill, materialize
from unisono.parallel.strategy import cast_weights
from unisono.quantize.layers import SCALES, check_names, dequantize, quantize
from unisono.quantize.reduced_layers import prune_weights, reduce_products
from unisono.quantize.reduced_products import Products
from unisono.settings import Settings

_MOST_RETRIES_S = 60.0  # maximum seconds to retry while the run deletes checkpoints before they can be read


def export_run(
    run: Path,
    folder: Path,
    *,
    step: str | None = None,
    weights: str = "auto",
    reference: str | None = None,
    file_format: str | None = None,
) -> str:
    """Exports a run's checkpoint to `folder`; returns a description of the weights it wrote.

    `reference` names the recipe; by default, run.json names it. `file_format` is one of the recipe's export_formats.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; export to a folder")
    if file_format is not None:
        _check_format(_recipe_of(run, reference)[1], file_format)
    recipe, model, description = load_trained(run, step=step, weights=weights, reference=reference, keep_dtype=True)
    recipe.export_format = file_format
    try:
        with _all_or_nothing(folder):
            recipe.export(model, folder)
            _make_readable(folder)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{folder} cannot be written ({reason}); free some space, or export to another folder"
        ) from None
    return description


@contextmanager
def _all_or_nothing(folder: Path) -> Iterator[None]:
    """Creates the folder; if the body fails, removes everything that it wrote. Existing files stay."""
    existed = folder.is_dir()
    before = {path.name for path in folder.iterdir()} if existed else set()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with suppress(OSError):
            for path in [path for path in folder.iterdir() if path.name not in before]:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            if not existed:
                folder.rmdir()
        raise


def _make_readable(folder: Path) -> None:
    """Gives safetensors files the usual permissions; the library makes them readable only by their owner."""
    os.umask(umask := os.umask(0))
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o666 & ~umask)


def load_trained(
    run: Path,
    *,
    step: str | None = None,
    weights: str = "auto",
    reference: str | None = None,
    keep_dtype: bool = False,
) -> tuple[Recipe, nn.Module, str]:
    """Returns the recipe and the trained model of a run, on the CPU, and a description of the weights.

    If `keep_dtype` is set, a model that was trained in float64 stays float64; otherwise it has the recipe's dtypes.
    """
    record, recipe_class = _recipe_of(run, reference)
    if not all(isinstance(record.get(name), dict) for name in ("config", "sources")):
        raise UserError(f"{run}: run.json is damaged: it does not contain the settings of the run")
    resolved = settings_in(record, (Settings, recipe_class.Config))
    # Read the checkpoint before building the model: building may be slow, and a run that still trains may delete it.
    checkpoint, state, is_average = _read_checkpoint(run, step, {"recipe": record["recipe"]}, weights)
    recipe = recipe_class(resolved.build(recipe_class.Config))
    recipe.prepared, recipe.base_precision = run / "prepared", resolved.values["base_precision"]
    model = recipe.model()
    initial = recipe.weights(model)
    _share_saved(model, state)
    if initial is None:
        materialize(model, resolved.values["seed"])
    else:
        fill(model, _SavedWeights(state, initial))
    if keep_dtype and resolved.values["dtype"] == "float64":
        cast_weights(model, torch.float64)
    # A layer that the run quantised itself has no weight in any file, so the checkpoint stores its quantised weight.
    converted = [name.removesuffix(f".{SCALES}") for name in state if name.endswith(f".{SCALES}")]
    if recipe.base_precision != "auto":
        quantize(model, check_names(model, converted, str(checkpoint)), recipe.base_precision)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    _load_state(model, state, not_saved=set() if initial is None else frozen)
    precision = resolved.build(Settings).precision
    if precision.sparsity != "no":
        own_blocks = recipe.blocks(model)
        blocks = repeated_blocks(model) if own_blocks is None else own_blocks
        reduce_products(model, blocks, Products(sparse=True), precision.quantize_min_size, recipe.full_precision(model))
        prune_weights(model)
    dequantize(model, torch.float64 if keep_dtype and resolved.values["dtype"] == "float64" else torch.float32)
    return recipe, model.eval(), f"{'averaged ' if is_average else ''}weights of {checkpoint.name}"


def _recipe_of(run: Path, reference: str | None) -> tuple[dict[str, Any], type[Recipe]]:
    """Returns the contents of a run's run.json, and the class of its recipe."""
    record = RunFolder.read(run)
    if record is None:
        raise UserError(f"{run} is not a run folder (no run.json)")
    return record, load_recipe(reference or _recipe_in(record, run))


def _check_format(recipe_class: type[Recipe], file_format: str) -> None:
    formats = recipe_class.export_formats
    if file_format not in formats:
        choice = f"choose {', '.join(formats)}" if formats else "this recipe has only one format: remove --format"
        raise UserError(f"--format {file_format}: {choice}")


def _read_checkpoint(
    run: Path, step: str | None, identity: dict[str, Any], weights: str
) -> tuple[Path, dict[str, Tensor], bool]:
    """Returns the checkpoint to export, its weights by name, and whether they are the moving average.

    A run that is still training deletes old checkpoints. If it deletes the chosen checkpoint while it is being
    read, reads the newest checkpoint instead.
    """
    deadline = time.monotonic() + _MOST_RETRIES_S
    while True:
        steps_before = list_steps(run / "checkpoints")
        checkpoint: Path | None = None
        try:
            checkpoint = _find(run, step, identity)
            state, is_average = _weights_of(checkpoint, weights)
            if checkpoint.is_dir():  # the checkpoint still exists, so it was read completely
                return checkpoint, state, is_average
            failure: Exception = CheckpointError(f"{checkpoint} was deleted while it was being read")
        except (UserError, RanksFailed, BadTensorFile, OSError) as error:
            failure = error
        vanished = not checkpoint.is_dir() if checkpoint else steps_before != list_steps(run / "checkpoints")
        is_fixed = step is not None and is_step(step)
        if vanished and not is_fixed and time.monotonic() < deadline:
            continue
        if vanished and checkpoint is not None:
            raise UserError(f"{checkpoint} was deleted during the export; export another step, or raise keep_last")
        if isinstance(failure, UserError):
            raise failure
        raise UserError(f"{checkpoint} cannot be read ({failure}); export another step") from None


def _weights_of(checkpoint: Path, weights: str) -> tuple[dict[str, Tensor], bool]:
    has_average = any(name.startswith("ema.") for name in describe(checkpoint))
    if weights == "ema" and not has_average:
        raise UserError(f"{checkpoint} has no moving average; train with --ema_decay, or export --weights model")
    is_average = weights != "model" and has_average
    average = load_whole(checkpoint, "ema.") if is_average else {}
    return load_whole(checkpoint, "model.", without=average) | average, is_average


def _share_saved(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Replaces weights on the meta device by the checkpoint's tensors, so that memory holds them only once.

    A weight stays on meta if several modules share it, or if its shape or dtype differs in the checkpoint.
    """
    uses = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    for name, parameter in list(model.named_parameters()):
        saved = state.get(name)
        if saved is None or not parameter.is_meta or uses[id(parameter)] > 1:
            continue
        if saved.shape == parameter.shape and saved.dtype == parameter.dtype:
            owner, _, short = name.rpartition(".")
            setattr(model.get_submodule(owner), short, nn.Parameter(saved, requires_grad=parameter.requires_grad))


class _SavedWeights:
    """The weights in a checkpoint. Weights that the checkpoint does not store have their initial values."""

    def __init__(self, state: Mapping[str, Tensor], initial: Weights) -> None:
        self._state, self._initial = state, initial

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Returns the rows from start to stop - 1 of a weight."""
        saved = self._state.get(name)
        return self._initial.rows(name, start, stop) if saved is None else saved[start:stop]


def _recipe_in(record: dict[str, Any], run: Path) -> str:
    """Returns the reference of the recipe in run.json."""
    reference = record.get("recipe_from")
    if not isinstance(reference, str):
        raise UserError(f"{run}: run.json does not name the file of {record['recipe']}; pass --recipe file.py:Class")
    # run.json is untrusted data: it may name a recipe of the user, but must not point to code in the run folder.
    if any(path.resolve().is_relative_to(run.resolve()) for path in _module_paths(reference.rpartition(":")[0])):
        raise UserError(
            f"{run}: its run.json names a recipe inside the run folder ({reference}); pass --recipe file.py:Class if "
            "you trust it"
        )
    return reference


def _module_paths(name: str) -> Iterator[Path]:
    """Yields the paths at which Python would look for a recipe's file, or for a module and its packages."""
    yield Path(name)
    parts = name.split(".")
    for folder in {*sys.path, "", os.getcwd()}:
        for number in range(1, len(parts) + 1):
            path = Path(folder, *parts[:number])
            yield from (path, path.with_name(f"{path.name}.py"))


def _find(run: Path, step: str | None, identity: dict[str, Any]) -> Path:
    """Returns the checkpoint to export, which must be valid. `step` is a number, "best", or "newest" (the default)."""
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


def _load_state(model: nn.Module, state: dict[str, Tensor], not_saved: set[str]) -> None:
    own = model.state_dict()
    saved = {name: tensor.to(own[name].dtype) if name in own else tensor for name, tensor in state.items()}
    try:
        missing, unexpected = model.load_state_dict(saved, strict=False)
    except RuntimeError as error:  # shapes differ
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"the checkpoint does not match the recipe's model: {reason}") from None
    filled = {own[name].data_ptr() for name in saved if name in own}
    # A checkpoint stores tied weights under one name.
    missing = [name for name in missing if own[name].data_ptr() not in filled and name not in not_saved]
    if missing or unexpected:
        names = [f"missing: {name}" for name in missing[:2]] + [f"unexpected: {name}" for name in unexpected[:2]]
        raise UserError(f"the checkpoint does not match the recipe's model ({', '.join(names)})")
