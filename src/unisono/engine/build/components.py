"""Builds the components of training from a recipe and settings: a distributed model, an optimizer and a state."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from unisono.cluster.agree import Agreement
from unisono.data.bits import Purpose, key_of
from unisono.data.seeding import seed_everything
from unisono.engine.batch import BatchPlan
from unisono.engine.build.base_precision import BasePrecision
from unisono.engine.build.blocks_on_host import SwapPlan, plan_blocks_on_host
from unisono.engine.build.build_once import build_once
from unisono.engine.build.choose_strategy import choose_run_strategy
from unisono.engine.build.device import has_flash_attention
from unisono.engine.build.dropout import disable_dropout
from unisono.engine.build.recording import check_strategy_records, plan_recording
from unisono.engine.build.reduced_products import reduce_linears
from unisono.engine.recipe import Recipe
from unisono.engine.state import GroupState, TrainState
from unisono.engine.step.components import Components, TrainedGroup
from unisono.engine.step.ema import Average, Ema, ScheduleFreeAverage
from unisono.engine.step.learning_rate import learning_rate_scale
from unisono.engine.step.make_optimizer import NamedParameters, not_for_muon
from unisono.engine.step.optimizer_wrapper import OptimizerWrapper
from unisono.engine.step.precision import LossScale, weight_type
from unisono.engine.turns.group import Group, check_groups, weights_of
from unisono.engine.turns.rhythm import Rhythm
from unisono.errors import ConfigError
from unisono.optim.schedule_free import ScheduleFreeAdamW
from unisono.parallel.blocks.mixed import MixedBlocks
from unisono.parallel.blocks.repeated import compile_blocks, recompute_activations, repeated_blocks
from unisono.parallel.blocks.selective import why_not_selective
from unisono.parallel.blocks.streamed_update import StreamedUpdate
from unisono.parallel.blocks.swap import BlockSwap, swapped_weights
from unisono.parallel.context import make_context
from unisono.parallel.data_parallel import DataParallel
from unisono.parallel.ddp import DDP
from unisono.parallel.frozen import shard_frozen
from unisono.parallel.fsdp import FSDP
from unisono.parallel.materialize import Weights, fill
from unisono.parallel.single import Single
from unisono.parallel.strategy import Placement, Strategy, cast_weights, place_frozen
from unisono.settings import EmaSettings, Settings

STRATEGIES: dict[str, type[Strategy]] = {kind.name: kind for kind in (Single, DataParallel, DDP, FSDP)}


@dataclass(frozen=True)
class _InitialModel:
    """The recipe's model before it is distributed."""

    module: nn.Module
    weights: Weights | None  # result of Recipe.weights()
    source: Weights | None  # fills a module that is on the meta device
    full_precision: Sequence[str]  # names of weights that are never cast to 16-bit
    blocks: Sequence[nn.Module]
    base: BasePrecision
    groups: Sequence[Group]  # trained in turn; empty: all weights are trained together
    weights_of_groups: Sequence[Sequence[str]]
    remarks: list[str]


def build_components(
    recipe: Recipe, settings: Settings, placement: Placement, batch: BatchPlan, agreement: Agreement
) -> Components:
    """Builds the model and all components that train it, in their state at step 0; every rank calls it."""
    recipe.global_batch = batch.global_batch
    recipe.context = make_context(placement.rank, placement.world, placement.context)
    recipe.flash_attention = placement.compute_type is not None and has_flash_attention(placement.device)
    model = _initial_model(recipe, settings, placement, agreement)
    chosen = choose_run_strategy(model.module, settings, placement)
    placement = replace(placement, shard_size=chosen.shard_size)
    reduced = reduce_linears(
        model.module, model.blocks, settings.precision, placement, model.full_precision, sharded=chosen.name == "fsdp"
    )
    recording = plan_recording(recipe, settings, placement.device, chosen.name)
    swap_plan = plan_blocks_on_host(model.module, model.blocks, settings, placement)
    if model.groups and swap_plan.blocks and swap_plan.sizes.is_trained:
        raise ConfigError(
            "blocks_on_host: blocks whose weights are trained cannot be stored on the host in a recipe with groups(); "
            "remove it, or freeze their weights (a LoRA)"
        )
    swap = _swap_blocks(model, swap_plan, placement, chosen.name)
    mixed = _mix_levels(model, settings, placement)
    strategy, remarks = _distribute(model, swap, recipe, settings, placement, chosen.name, mixed)
    on_host = None if swap is None or swap.gradients is None else StreamedUpdate(swap)
    recipe.shards = strategy.row_shards()
    state = TrainState(batch.global_batch)
    groups = [
        _build_group(declared, number, recipe, settings, model, strategy, state, on_host)
        for number, declared in enumerate(model.groups or [None])
    ]
    if recording.captures:
        check_strategy_records(strategy)
    optimizers = [remark for group in groups for remark in group.optimizer.remarks]
    return Components(
        recipe=recipe,
        strategy=strategy,
        why_strategy=chosen.reason,
        groups=groups,
        rhythm=Rhythm([group.steps for group in model.groups]) if model.groups else Rhythm(),
        state=state,
        remarks=[*recording.remarks, *model.remarks, *reduced, *swap_plan.remarks, *remarks, *optimizers],
        captures=recording.captures,
        recordable=recording.is_possible,
        blocks_on_host=swap_plan.sizes,
        mixed_blocks=mixed,
    )


def _build_group(
    declared: Group | None,
    number: int,
    recipe: Recipe,
    settings: Settings,
    model: _InitialModel,
    strategy: Strategy,
    state: TrainState,
    on_host: StreamedUpdate | None,
) -> TrainedGroup:
    """Builds the optimizer, moving average and loss scale of one group of weights, or of all weights without groups."""
    parameters, optim, ema = strategy.parameters, settings.optim, settings.ema
    own_state: TrainState | GroupState = state
    if declared is not None:
        held = set(model.weights_of_groups[number])
        parameters = [(name, parameter) for name, parameter in parameters if name in held]
        optim, ema = declared.optim(optim), declared.ema(ema)
        own_state = state.groups[declared.name] = GroupState(declared.steps)
        recipe.group = declared.name
    optimizer = OptimizerWrapper(
        parameters,
        optim,
        recipe.optimizer,
        learning_rate_scale(state.global_batch, optim),
        sharded=strategy.sharded,
        shards=recipe.shards,
        not_for_muon=not_for_muon(model.module, model.blocks),
        on_host=on_host,
    )
    scale = LossScale(strategy.placement.device) if settings.precision.mixed_precision == "fp16" else None
    return TrainedGroup(number, declared, optimizer, _average(parameters, optimizer, ema, on_host), scale, own_state)


def _average(
    parameters: NamedParameters, optimizer: OptimizerWrapper, settings: EmaSettings, on_host: StreamedUpdate | None
) -> Average | None:
    if isinstance(optimizer.optimizer, ScheduleFreeAdamW):
        if settings.ema_decay > 0:  # check_settings does not see a recipe's own optimizer
            raise ConfigError("optimizer(): ScheduleFreeAdamW averages the weights itself; use ema_decay 0")
        return ScheduleFreeAverage(parameters, optimizer.optimizer)
    return Ema(parameters, settings, on_host) if settings.ema_decay > 0 else None


def _initial_model(recipe: Recipe, settings: Settings, placement: Placement, agreement: Agreement) -> _InitialModel:
    # Each rank quantises frozen weights itself, as it reads or builds them.
    shared = settings.precision.base_precision == "auto"
    built = build_once(recipe, settings.run.seed, placement, agreement, shared=shared)
    model, full_precision = built.module, recipe.full_precision(built.module)
    cast_weights(model, weight_type(settings.precision), placement.compute_type, full_precision)
    model.train()
    if settings.run.disable_dropout:
        disable_dropout(model)
    model, remarks = _handle_batch_norm(model, settings, placement)
    own_blocks = recipe.blocks(model)
    blocks = list(own_blocks) if own_blocks is not None else repeated_blocks(model)
    base = BasePrecision(recipe, settings.precision.base_precision, placement)
    converted = base.convert("model", model, blocks, full_precision)
    weights, source = built.weights, built.source
    if weights is not None and converted:
        weights = source = base.source(weights, converted)
    groups = check_groups(recipe.groups())
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    held = weights_of(groups, trained) if groups else []
    remarks = [*built.remarks, *remarks]
    return _InitialModel(model, weights, source, full_precision, blocks, base, groups, held, remarks)


def _handle_batch_norm(model: nn.Module, settings: Settings, placement: Placement) -> tuple[nn.Module, list[str]]:
    """Synchronises batch norm if the settings say so, and warns about it.

    Batch norm depends on the other samples in its micro-batch. It is the only layer that makes the result of a run
    depend on the micro-batch size.
    """
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return model, []
    if settings.parallel.sync_batch_norm and placement.world > 1:
        if placement.device.type != "cuda":
            raise ConfigError("sync_batch_norm needs GPUs (torch has no CPU version); do not set it on the CPU")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return model, ["sync_batch_norm: statistics cover all ranks, but still depend on gradient accumulation"]
    return model, [
        "the model has batch norm, whose result depends on the micro-batch: a run with a different number of GPUs or "
        "micro-batches will differ (it would not with group norm or layer norm)"
    ]


def _swap_blocks(model: _InitialModel, plan: SwapPlan, placement: Placement, strategy: str) -> BlockSwap | None:
    """Gives the model real weights, and moves the weights of the blocks in the plan to host memory."""
    is_trained = plan.sizes.is_trained
    if model.source is not None and strategy != "fsdp":  # fsdp fills its shards itself
        waiting = swapped_weights(model.module, plan.blocks, trained=is_trained)
        fill(model.module, model.source, placement.device, on_host=waiting)
    return BlockSwap(model.module, plan.blocks, placement.device, trained=is_trained) if plan.blocks else None


def _distribute(
    model: _InitialModel,
    swap: BlockSwap | None,
    recipe: Recipe,
    settings: Settings,
    placement: Placement,
    name: str,
    mixed: MixedBlocks | None,
) -> tuple[Strategy, list[str]]:
    """Applies activation checkpointing and compilation, and places the model and the frozen modules on devices."""
    remarks = [] if mixed else _transform_blocks(model.module, model.blocks, swap, settings, placement)
    sharded = recipe.sharded()
    with nullcontext() if swap is None else swap.set_aside():
        strategy = STRATEGIES[name](
            model.module,
            model.blocks,
            placement,
            settings.parallel,
            model.full_precision,
            model.weights,
            source=model.source,
            groups=model.weights_of_groups,
            gathers=(bool(sharded) and placement.world > 1) or placement.context > 1,
        )
    if swap is not None:
        strategy.add_swapped(swap)
        if placement.world > 1:
            swap.broadcast()
    seed_everything(key_of(Purpose.BUILD, settings.run.seed, 1), placement.devices)
    frozen = recipe.frozen()
    for module_name, (weights, whole) in sharded.items():
        module = frozen[module_name].requires_grad_(False)
        converted = model.base.convert(module_name, module, repeated_blocks(module), whole)
        source = model.base.source(weights, converted)
        shard_frozen(module, strategy.shard_mesh, placement.device, source, whole)
    whole_modules = {name: module for name, module in frozen.items() if name not in sharded}
    for module_name, module in whole_modules.items():
        module.requires_grad_(False)
        model.base.convert(module_name, module, repeated_blocks(module))
    place_frozen(whole_modules, placement.device)
    if settings.precision.dtype == "float64":
        for module in frozen.values():
            cast_weights(module, torch.float64)
    return strategy, [*remarks, *model.base.remarks(sharded=strategy.sharded or bool(sharded))]


def _mix_levels(model: _InitialModel, settings: Settings, placement: Placement) -> MixedBlocks | None:
    """Prepares the blocks for a choice of their recomputation levels, if the settings limit activation memory."""
    if settings.precision.activation_memory_gb is None:
        return None
    if len(placement.devices) > 1:
        raise ConfigError("activation_memory_gb works with strategy single, ddp and fsdp, not with dp")
    if not model.blocks:
        raise ConfigError("activation_memory_gb: the model has no repeated blocks; use activation_checkpointing")
    return MixedBlocks(model.blocks, compiles=settings.precision.compile)


def _transform_blocks(
    model: nn.Module, blocks: Sequence[nn.Module], swap: BlockSwap | None, settings: Settings, placement: Placement
) -> list[str]:
    remarks = []
    if swap is not None:
        swap.attach(blocks, compiles=settings.precision.compile)
    if settings.precision.activation_checkpointing:
        if not blocks:
            remarks.append("activation_checkpointing: the model has no repeated blocks; recomputing all of it")
        recomputed = blocks[:: settings.precision.recompute_every] or [model]
        selective = settings.precision.activation_checkpointing == "selective"
        obstacles = {type(block).__name__: why for block in recomputed if (why := why_not_selective(block)) is not None}
        if selective and obstacles:
            name, why = next(iter(obstacles.items()))
            remarks.append(f"activation_checkpointing selective: {name} {why}; recomputing such blocks as a whole")
        elif selective and swap is not None and settings.precision.compile:
            # Swapped blocks are compiled first, and torch cannot choose which results to keep inside compiled code.
            selective = False
            why = "compiled blocks on the host can only be recomputed as a whole"
            remarks.append(f"activation_checkpointing selective: {why}; recomputing whole blocks")
        for block in recomputed:
            recompute_activations(block, selective=selective and type(block).__name__ not in obstacles)
    if settings.precision.compile and len(placement.devices) > 1:
        # nn.DataParallel's copies of a compiled module would all compute with the first one's weights.
        remarks.append("compile: dp's model copies cannot be compiled; training without compile (ddp supports it)")
    elif settings.precision.compile and swap is None:
        compile_blocks(model, blocks)
    return remarks
