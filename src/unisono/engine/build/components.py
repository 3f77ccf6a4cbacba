"""Builds the components that train: from a recipe and settings to a distributed model, an optimizer and a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from unisono.data.bits import Purpose, key_of
from unisono.data.seeding import seed_everything
from unisono.engine.batch import BatchPlan
from unisono.engine.build.choose_strategy import choose_run_strategy
from unisono.engine.build.device import has_flash_attention
from unisono.engine.build.dropout import disable_dropout
from unisono.engine.build.model import build_model
from unisono.engine.build.recording import check_strategy_records, plan_recording
from unisono.engine.recipe import Recipe
from unisono.engine.state import TrainState
from unisono.engine.step.components import Components
from unisono.engine.step.ema import Average, Ema, ScheduleFreeAverage
from unisono.engine.step.learning_rate import learning_rate_scale
from unisono.engine.step.make_optimizer import not_for_muon
from unisono.engine.step.optimizer_wrapper import OptimizerWrapper
from unisono.engine.step.precision import LossScale, weight_type
from unisono.errors import ConfigError
from unisono.optim.schedule_free import ScheduleFreeAdamW
from unisono.parallel.blocks import compile_blocks, recompute_activations, repeated_blocks
from unisono.parallel.data_parallel import DataParallel
from unisono.parallel.ddp import DDP
from unisono.parallel.frozen import shard_frozen
from unisono.parallel.fsdp import FSDP
from unisono.parallel.materialize import Weights, fill, materialize
from unisono.parallel.single import Single
from unisono.parallel.strategy import Placement, Strategy, cast_weights, place_frozen
from unisono.settings import Settings

STRATEGIES: dict[str, type[Strategy]] = {kind.name: kind for kind in (Single, DataParallel, DDP, FSDP)}


@dataclass(frozen=True)
class _InitialModel:
    """The recipe's model before it is distributed."""

    module: nn.Module
    weights: Weights | None  # fills a module that is on the meta device
    full_precision: Sequence[str]  # names of weights that are never cast to 16-bit
    remarks: list[str]


def build_components(recipe: Recipe, settings: Settings, placement: Placement, batch: BatchPlan) -> Components:
    """Builds the model and everything that trains it, at step 0; every rank calls it."""
    recipe.global_batch = batch.global_batch
    recipe.flash_attention = placement.compute_type is not None and has_flash_attention(placement.device)
    model = _initial_model(recipe, settings, placement)
    strategy_name, reason = choose_run_strategy(model.module, settings, placement)
    recording = plan_recording(recipe, settings, placement.device, strategy_name)
    own_blocks = recipe.blocks(model.module)
    blocks = list(own_blocks) if own_blocks is not None else repeated_blocks(model.module)
    strategy, remarks = _distribute(model, blocks, recipe, settings, placement, strategy_name)
    recipe.shards = strategy.row_shards()
    optimizer = OptimizerWrapper(
        strategy.parameters,
        settings.optim,
        recipe.optimizer,
        learning_rate_scale(batch.global_batch, settings.optim),
        sharded=strategy.sharded,
        shards=recipe.shards,
        not_for_muon=not_for_muon(model.module, blocks),
    )
    ema = _average(strategy, optimizer, settings)
    scale = LossScale(placement.device) if settings.precision.mixed_precision == "fp16" else None
    if recording.captures:
        check_strategy_records(strategy)
    return Components(
        recipe=recipe,
        strategy=strategy,
        why_strategy=reason,
        optimizer=optimizer,
        ema=ema,
        scale=scale,
        state=TrainState(batch.global_batch),
        remarks=[*recording.remarks, *model.remarks, *remarks, *optimizer.remarks],
        captures=recording.captures,
        recordable=recording.is_possible,
    )


def _average(strategy: Strategy, optimizer: OptimizerWrapper, settings: Settings) -> Average | None:
    if isinstance(optimizer.optimizer, ScheduleFreeAdamW):
        if settings.ema.ema_decay > 0:  # check_settings does not see a recipe's own optimizer
            raise ConfigError("optimizer(): ScheduleFreeAdamW averages the weights itself; use ema_decay 0")
        return ScheduleFreeAverage(strategy.parameters, optimizer.optimizer)
    return Ema(strategy.parameters, settings.ema) if settings.ema.ema_decay > 0 else None


def _initial_model(recipe: Recipe, settings: Settings, placement: Placement) -> _InitialModel:
    # The raw seed, not a derived key: initial weights equal those of a script that calls torch.manual_seed(seed).
    seed_everything(settings.run.seed, placement.devices)
    model = build_model(recipe)
    weights, full_precision = recipe.weights(model), recipe.full_precision(model)
    if weights is None:
        materialize(model, settings.run.seed)
    cast_weights(model, weight_type(settings.precision), placement.compute_type, full_precision)
    model.train()
    if settings.run.disable_dropout:
        disable_dropout(model)
    model, remarks = _handle_batch_norm(model, settings, placement)
    return _InitialModel(model, weights, full_precision, remarks)


def _handle_batch_norm(model: nn.Module, settings: Settings, placement: Placement) -> tuple[nn.Module, list[str]]:
    """Synchronises batch norm if the settings say so, and warns about it.

    Batch norm depends on the other samples of its micro-batch. It is the only layer that makes a run depend on the
    micro-batch.
    """
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return model, []
    if settings.parallel.sync_batch_norm and placement.world > 1:
        if placement.device.type != "cuda":
            raise ConfigError("sync_batch_norm needs GPUs (torch has no CPU version); leave it out on the CPU")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return model, ["sync_batch_norm: statistics cover all ranks, but still depend on gradient accumulation"]
    return model, [
        "the model has batch norm, whose result depends on the micro-batch: other numbers of GPUs or micro-batches "
        "will not train exactly alike (group norm or layer norm would)"
    ]


def _distribute(
    model: _InitialModel,
    blocks: Sequence[nn.Module],
    recipe: Recipe,
    settings: Settings,
    placement: Placement,
    name: str,
) -> tuple[Strategy, list[str]]:
    """Applies activation checkpointing and compilation, and places the model and the frozen modules on devices."""
    if model.weights is not None and name != "fsdp":  # fsdp fills its shards itself
        fill(model.module, model.weights)
    remarks = _transform_blocks(model.module, blocks, settings, placement)
    sharded = recipe.sharded()
    strategy = STRATEGIES[name](
        model.module,
        blocks,
        placement,
        settings.parallel,
        model.full_precision,
        model.weights,
        gathers=bool(sharded) and placement.world > 1,
    )
    seed_everything(key_of(Purpose.BUILD, settings.run.seed, 1), placement.devices)
    frozen = recipe.frozen()
    for module_name, (weights, whole) in sharded.items():
        shard_frozen(frozen[module_name], placement, weights, whole)
    whole_modules = {name: module for name, module in frozen.items() if name not in sharded}
    place_frozen(whole_modules, placement.device)
    if settings.precision.dtype == "float64":
        for module in frozen.values():
            cast_weights(module, torch.float64)
    return strategy, remarks


def _transform_blocks(
    model: nn.Module, blocks: Sequence[nn.Module], settings: Settings, placement: Placement
) -> list[str]:
    remarks = []
    if settings.precision.activation_checkpointing:
        if not blocks:
            remarks.append("activation_checkpointing: the model has no repeated blocks; recomputing all of it")
        for block in blocks[:: settings.precision.recompute_every] or [model]:
            recompute_activations(block)
    if settings.precision.compile and len(placement.devices) > 1:
        # nn.DataParallel's copies of a compiled module would all compute with the first one's weights.
        remarks.append("compile: dp's model copies cannot be compiled; training without compile (ddp supports it)")
    elif settings.precision.compile:
        compile_blocks(model, blocks)
    return remarks
