"""Builds a recipe's model once per run instead of once per rank.

Rank 0 calls model() first. If the model is small, the other ranks build it too, from the same seed. If it is large,
they build it on the meta device, which takes no memory, and later receive rank 0's weights. In either case, the initial
weights are the same as in a single process. A model that cannot be built on the meta device is built in full on every
rank.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor, nn

from unisono.cluster.agree import Agreement
from unisono.data.bits import Purpose, key_of
from unisono.data.seeding import seed_everything
from unisono.engine.build.model import build_model
from unisono.engine.memory.cpu_heap import return_freed_memory
from unisono.engine.recipe import Recipe
from unisono.formatting import describe_exception, format_bytes
from unisono.parallel.from_rank_zero import (
    FromRankZero,
    NotMovable,
    Shapes,
    broadcast_buffers,
    exchange,
    give_weights,
    take_weights,
)
from unisono.parallel.materialize import Weights, materialize
from unisono.parallel.strategy import Placement

SMALL = 64 * 2**20
"""Maximum size in bytes of a model that every rank builds."""
WORTH_A_REMARK = 2**30
"""Minimum size in bytes of a model for which a note tells the user why each rank builds it."""

_SMALL_PART = 50  # every rank builds a model if at most 1/50 of its bytes (a LoRA, say) are not read from files
_PLAIN = (bool, int, float, str, torch.device, torch.dtype, type(None))


@dataclass(frozen=True)
class BuiltModel:
    """A recipe's model before it is distributed."""

    module: nn.Module
    weights: Weights | None  # result of Recipe.weights()
    source: Weights | None  # source to fill the module from if it is on the meta device
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Announcement:
    """A description of a large model, which rank 0 sends to the other ranks."""

    structure: Sequence[str]
    shapes: Shapes


def build_once(
    recipe: Recipe, seed: int, placement: Placement, agreement: Agreement, *, shared: bool = True
) -> BuiltModel:
    """Calls Recipe.model() and Recipe.weights() on every rank; a large model gets real weights on rank 0 only.

    Without `shared`, every rank has the real weights.
    """
    if placement.world == 1 or not (shared and recipe.built_by_rank_zero):
        return _build(recipe, seed, placement)
    if placement.rank == 0:
        return _build_for_all(recipe, seed, placement, agreement)
    announced = agreement.broadcast(None)
    if announced is None:
        return _build(recipe, seed, placement)
    return _build_on_meta(recipe, seed, placement, agreement, announced)


def _build(recipe: Recipe, seed: int, placement: Placement) -> BuiltModel:
    """Returns the model with its initial weights, except those that come from files."""
    # Use the raw seed: the initial weights are then the same as in a script that calls torch.manual_seed(seed).
    seed_everything(seed, placement.devices)
    model = build_model(recipe)
    weights = _weights_of(recipe, model, seed, placement)
    if weights is None:
        materialize(model, seed)
    return BuiltModel(model, weights, weights)


def _weights_of(recipe: Recipe, model: nn.Module, seed: int, placement: Placement) -> Weights | None:
    # Building on the meta device draws no random numbers. From here on, all ranks draw the same numbers again.
    seed_everything(key_of(Purpose.BUILD, seed, 3), placement.devices)
    return recipe.weights(model)


def _build_for_all(recipe: Recipe, seed: int, placement: Placement, agreement: Agreement) -> BuiltModel:
    """Builds the model on rank 0. If the model is large, announces it to the others and detaches its weights."""
    announced, taken = None, dict[str, Tensor]()
    try:
        built = _build(recipe, seed, placement)
        size, whole_size = _sizes(built.module)
        if size > max(SMALL, whole_size // _SMALL_PART):
            structure = list(_structure(built.module))
            taken = take_weights(built.module)
            shapes = {name: (weight.shape, weight.dtype) for name, weight in taken.items()}
            announced = _Announcement(structure, shapes)
    except NotMovable as error:
        return _everywhere(built, size, str(error))
    finally:  # sent even after an error: the other ranks then call model() themselves and report the same error
        agreement.broadcast(announced)
    if announced is None:
        return built
    if (reason := _reason_of_any(None, agreement)) is not None:
        give_weights(built.module, taken)
        return _everywhere(built, size, reason)
    broadcast_buffers(built.module, placement.device, is_rank_zero=True)
    source = FromRankZero(announced.shapes, taken, placement.device, built.weights, return_freed_memory)
    return BuiltModel(built.module, built.weights, source)


def _build_on_meta(
    recipe: Recipe, seed: int, placement: Placement, agreement: Agreement, announced: _Announcement
) -> BuiltModel:
    """Builds a model on the meta device on the other ranks, and checks that it equals rank 0's model."""
    reason, model = None, None
    existing = _meta_tensors()
    seed_everything(seed, placement.devices)
    generator = torch.get_rng_state()
    try:
        with torch.device("meta"):
            model = build_model(recipe)
        reason = _difference(model, announced, existing)
        if not torch.equal(generator, torch.get_rng_state()):
            # These numbers differ from rank 0's, whose generator has also drawn the initial weights.
            reason = "model() draws random numbers on the CPU even if the default device is meta"
        weights = _weights_of(recipe, model, seed, placement)
    except Exception as error:
        reason = f"model() on the meta device: {describe_exception(error)}"
    if _reason_of_any(reason, agreement) is not None:
        del model
        return _build(recipe, seed, placement)
    assert model is not None
    broadcast_buffers(model, placement.device, is_rank_zero=False)
    return BuiltModel(model, weights, FromRankZero(announced.shapes, {}, placement.device, weights))


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Returns the bytes of the weights in host memory, and of all weights including those still to be read."""
    sizes = [(weight.nbytes, weight.is_meta) for weight in model.parameters()]
    return sum(size for size, is_meta in sizes if not is_meta), sum(size for size, _ in sizes)


def _everywhere(built: BuiltModel, size: int, reason: str) -> BuiltModel:
    remark = (
        f"each rank builds the whole model ({format_bytes(size)}) in host memory, because rank 0 cannot build it for "
        f"all: {reason}"
    )
    return BuiltModel(built.module, built.weights, built.source, [remark] if size > WORTH_A_REMARK else [])


def _reason_of_any(reason: str | None, agreement: Agreement) -> str | None:
    reasons = agreement.all_gather(reason)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text is not None), None)


def _difference(model: nn.Module, announced: _Announcement, existing: Sequence[Tensor]) -> str | None:
    """Returns the reason why a model on the meta device cannot replace rank 0's model; None if it can."""
    for here, there in zip_longest(_structure(model), announced.structure):
        if here != there:
            return f"on the meta device it has {here}, otherwise {there}"
    tensors = dict[str, Tensor]([*model.named_parameters(), *model.named_buffers()])
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            return f"{name} is not on the meta device"
    # Rank 0 sends only weights and buffers, not, say, a mask in a plain attribute or a second model in the recipe.
    expected_ids = {id(part) for tensor in tensors.values() for part in (tensor, tensor._base)} | {*map(id, existing)}
    if any(id(tensor) not in expected_ids for tensor in _meta_tensors()):
        return "model() creates tensors that are neither weights nor buffers of the model"
    try:
        for name, tensor in tensors.items():
            exchange(name, tensor, torch.empty_like(tensor))
    except NotMovable as error:
        return str(error)
    return None


def _structure(model: nn.Module) -> Iterator[str]:
    """Yields lines that describe the model's modules, weights and buffers, without their values."""
    first_names: dict[int, str] = {}
    for prefix, module in model.named_modules():
        plain = {name: value for name, value in sorted(vars(module).items()) if isinstance(value, _PLAIN)}
        yield f"{prefix}: {type(module).__module__}.{type(module).__qualname__} {plain}"
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            shared = first_names.setdefault(id(tensor), f"{prefix}.{name}")
            is_saved = name not in module._non_persistent_buffers_set
            kind = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad} {is_saved}"
            yield f"{prefix}.{name} = {shared}: {kind}"


def _meta_tensors() -> list[Tensor]:
    """Returns all tensors on the meta device that Python code refers to."""
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.is_meta]
