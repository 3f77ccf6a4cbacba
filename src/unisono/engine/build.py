"""Puts a run together: from a recipe and settings to a placed model, an optimizer and data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.utils.data import Dataset

from unisono.data.bits import Purpose, key_of
from unisono.data.seeding import seed_everything
from unisono.engine.batch import BatchPlan
from unisono.engine.ema import Ema
from unisono.engine.optim import NOT_ELEMENTWISE, Updater, learning_rate_scale, named_optimizer
from unisono.engine.placement import has_flash_attention
from unisono.engine.precision import LossScale, weight_type
from unisono.engine.recipe import Recipe
from unisono.engine.state import TrainState
from unisono.errors import ConfigError, RecipeError
from unisono.parallel.blocks import compile_blocks, recompute_activations, repeated_blocks
from unisono.parallel.data_parallel import DataParallel
from unisono.parallel.ddp import DDP
from unisono.parallel.frozen import shard_frozen
from unisono.parallel.fsdp import FSDP
from unisono.parallel.materialize import fill, materialize
from unisono.parallel.single import Single
from unisono.parallel.strategy import Placement, Strategy, cast_weights, place_frozen
from unisono.planning.choose import Demand, choose_strategy
from unisono.settings import Settings

STRATEGIES: dict[str, type[Strategy]] = {kind.name: kind for kind in (Single, DataParallel, DDP, FSDP)}


@dataclass(frozen=True)
class Parts:
    """Everything that trains, on this rank."""

    recipe: Recipe
    strategy: Strategy
    why_strategy: str
    updater: Updater
    ema: Ema | None
    scale: LossScale | None
    state: TrainState
    remarks: list[str]  # what the user should be told once
    captures: bool  # steps are recorded as CUDA graphs
    recordable: bool  # they are not, and could be


def build_parts(recipe: Recipe, settings: Settings, place: Placement, batch: BatchPlan) -> Parts:
    """Builds the model and all that goes with it; the weights are those of step 0."""
    remarks: list[str] = []
    captures = settings.precision.cuda_graph and place.device.type == "cuda"
    if settings.precision.cuda_graph and not captures:
        remarks.append("cuda_graph: there is no GPU here; steps run as usual")
    seed_everything(settings.run.seed, place.devices)  # as a script would: torch.manual_seed(seed)
    recipe.global_batch = batch.global_batch
    recipe.flash_attention = place.compute_type is not None and has_flash_attention(place.device)
    model = recipe.model()
    if not isinstance(model, nn.Module):
        raise RecipeError(f"model() returned {type(model).__name__}; expected a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError("model() has no trainable parameters")
    weights, exact = recipe.weights(model), recipe.full_precision(model)
    if weights is None:
        materialize(model, settings.run.seed)
    cast_weights(model, weight_type(settings.precision), place.compute_type, exact)
    model.train()
    if settings.run.disable_dropout:
        disable_dropout(model)
    model = _with_batch_norm(model, settings, place, remarks)
    name, why = _strategy_name(model, settings, place)
    if name == "fsdp" and settings.optim.optimizer.lower() in NOT_ELEMENTWISE:
        raise ConfigError(
            f"optimizer {settings.optim.optimizer} updates whole matrices and cannot run on fsdp's shards"
        )
    obstacle = _obstacle_to_recording(recipe, settings, name)
    if obstacle is not None and (captures or (settings.precision.cuda_graph and recipe.coupled)):
        raise ConfigError(obstacle)
    if weights is not None and name != "fsdp":  # which fills its shards by itself
        fill(model, weights)
    named_blocks = recipe.blocks(model)
    blocks = list(named_blocks) if named_blocks is not None else repeated_blocks(model)
    if settings.precision.activation_checkpointing:
        if not blocks:
            remarks.append("activation_checkpointing: the model has no repeated blocks; recomputing all of it")
        for block in blocks[:: settings.precision.recompute_every] or [model]:
            recompute_activations(block)
    if settings.precision.compile and len(place.devices) > 1:
        # nn.DataParallel's copies of a compiled module would all compute with the first one's weights.
        remarks.append("compile: copies that dp makes cannot be compiled; computing without it (ddp can)")
    elif settings.precision.compile:
        compile_blocks(model, blocks)
    parted = recipe.sharded()
    strategy = STRATEGIES[name](
        model, blocks, place, settings.parallel, exact, weights, gathers=bool(parted) and place.world > 1
    )
    seed_everything(key_of(Purpose.BUILD, settings.run.seed, 1), place.devices)
    frozen = recipe.frozen()
    for part, (where, whole) in parted.items():
        shard_frozen(frozen[part], place, where, whole)
    place_frozen({name: module for name, module in frozen.items() if name not in parted}, place.device)
    if settings.precision.dtype == "float64":
        for module in frozen.values():
            cast_weights(module, torch.float64)
    updater = Updater(
        strategy.parameters,
        settings.optim,
        recipe.optimizer,
        learning_rate_scale(batch.global_batch, settings.optim),
    )
    ema = Ema(strategy.parameters, settings.ema) if settings.ema.ema_decay > 0 else None
    scale = LossScale(place.device) if settings.precision.mixed_precision == "fp16" else None
    if captures and not strategy.keep_gradients():
        raise ConfigError(
            "cuda_graph cannot record ddp with find_unused_parameters, static_graph or sync_batch_norm, nor without "
            "gradient_as_bucket_view; leave these out, or cuda_graph"
        )
    recordable = not captures and obstacle is None and place.device.type == "cuda" and not recipe.many_shapes
    state = TrainState(batch.global_batch)
    return Parts(recipe, strategy, why, updater, ema, scale, state, remarks, captures, recordable)


def _obstacle_to_recording(recipe: Recipe, settings: Settings, strategy: str) -> str | None:
    if strategy not in ("single", "ddp"):
        return f"cuda_graph works with strategy single and ddp, not with {strategy}; leave one of them out"
    if settings.precision.activation_checkpointing:
        # It asks for the state of the random numbers, which a recording does not know.
        return "cuda_graph cannot record activation_checkpointing; leave one of them out"
    if recipe.coupled:
        return "cuda_graph cannot record a loss that compares samples with each other; leave it out"
    if recipe.refresh_every:
        return "cuda_graph reads from the same memory for ever, and this run replaces its samples"
    return None


def _strategy_name(model: nn.Module, settings: Settings, place: Placement) -> tuple[str, str]:
    name, ranks = settings.parallel.strategy, place.world
    if name == "auto":
        trainable = _bytes_of(model, lambda parameter: parameter.requires_grad)
        optimizer = named_optimizer(settings.optim.optimizer).__name__.lower()
        demand = Demand.of(
            trainable_bytes=trainable,
            other_bytes=_bytes_of(model, lambda parameter: not parameter.requires_grad),
            optimizer_slots=2 if "adam" in optimizer else 1,
            ema=settings.ema.ema_decay > 0,
        )
        on_gpu = place.device.type == "cuda"
        memory = torch.cuda.get_device_properties(place.device).total_memory if on_gpu else None
        return choose_strategy(ranks=ranks, demand=demand, device_memory=memory)
    if name in ("single", "dp") and ranks > 1:
        raise ConfigError(f"strategy {name} is one process, but {ranks} were started; use ddp or fsdp, or start one")
    if name == "dp" and len(place.devices) == 1:
        return "single", "dp on one device is single"
    if name == "dp":
        return (
            "dp",
            f"{len(place.devices)} GPUs from one process (untested on more than one GPU; ddp is the tested way)",
        )
    return name, "as asked"


def _bytes_of(model: nn.Module, which: Callable[[nn.Parameter], bool]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters() if which(parameter))


def _with_batch_norm(model: nn.Module, settings: Settings, place: Placement, remarks: list[str]) -> nn.Module:
    """Batch norm looks at the other samples of its micro-batch: it alone breaks "any micro-batch, same run"."""
    has_it = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if not has_it:
        return model
    if settings.parallel.sync_batch_norm and place.world > 1:
        if place.device.type != "cuda":
            raise ConfigError("sync_batch_norm needs GPUs (torch has no CPU version); leave it out on the CPU")
        remarks.append("sync_batch_norm: statistics over all ranks' micro-batches; accumulation still changes them")
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-any-return, no-untyped-call]
    remarks.append(
        "the model has batch norm, whose result depends on the micro-batch: other numbers of GPUs or micro-batches "
        "will not train exactly alike (group norm or layer norm would)"
    )
    return model


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout probability to 0: dropout modules, and float attributes that are called dropout or drop."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name.lower() and isinstance(value, float):
                setattr(module, name, 0.0)


def build_dataset(recipe: Recipe, split: str, seed: int) -> Dataset[Any] | None:
    """The recipe's data for a split, checked; what it draws is the same on every rank and at every start."""
    seed_everything(key_of(Purpose.BUILD, seed, crc32(split.encode())))
    dataset = recipe.dataset(split)
    if dataset is None:
        if split == "train":
            raise RecipeError('dataset("train") returned None; return a map-style data set')
        return None
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise RecipeError(f'dataset("{split}") returned {type(dataset).__name__}, which lacks __len__ or __getitem__')
    if len(dataset) == 0:
        raise RecipeError(f'dataset("{split}") is empty; check the data path and filters')
    return dataset
