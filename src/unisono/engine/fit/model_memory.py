"""Predicts the memory of a training step under any settings, from the model on the meta device and one sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from unisono.data.noise import Noise
from unisono.engine.build.blocks_on_host import movable_blocks
from unisono.engine.build.choose_strategy import demand_of
from unisono.engine.build.model import build_model
from unisono.engine.recipe import Recipe
from unisono.engine.step.precision import compute_type, weight_type
from unisono.engine.turns.group import Group, check_groups
from unisono.formatting import describe_exception
from unisono.parallel.blocks.repeated import recompute_activations, repeated_blocks
from unisono.parallel.blocks.selective import why_not_selective
from unisono.parallel.blocks.swap import NUM_SLOTS
from unisono.parallel.strategy import cast_weights
from unisono.planning.blocks_on_host import BlocksOnHost
from unisono.planning.memory.estimate import WORKSPACE, Estimate
from unisono.planning.memory.trace import CannotTrace, Trace, extended, trace_step
from unisono.planning.speed.work import Work
from unisono.quantize.formats import FORMATS
from unisono.quantize.layers import frozen_linears, quantize
from unisono.settings import Settings

_TEMPORARY = {"adamw8bit": 48, "adamw4bit": 48, "adafactor": 16, "muon": 16, "prodigy": 16}
"""Temporary memory of an optimizer's update, in bytes per element of the largest weight."""


@dataclass(frozen=True)
class _Structure:
    """A model on the meta device, in the dtypes of its run."""

    recipe: Recipe
    module: nn.Module
    blocks: Sequence[nn.Module]
    linears: Sequence[str]  # frozen linear layers that base_precision converts
    exact: Sequence[str]  # weights that are never cast or sharded

    @cached_property
    def buffers(self) -> int:
        """Bytes of the model's buffers."""
        return sum(buffer.nbytes for buffer in self.module.buffers())

    @cached_property
    def trained_weights(self) -> int:
        """The number of trained weights."""
        return sum(weight.numel() for weight in self.module.parameters() if weight.requires_grad)

    def gathered_bytes(self, kind: torch.dtype | None) -> int:
        """Returns the bytes of all weights in the dtypes in which fsdp gathers them; `kind` is the 16-bit dtype."""
        return sum(
            weight.numel() * (kind.itemsize if kind is not None and weight.is_floating_point() else weight.itemsize)
            for weight in self.module.parameters()
        )


class ModelMemory:
    """Predicts memory; traces each combination of settings that changes the computation once."""

    def __init__(self, recipe: Recipe, sample: Callable[[Recipe], Any], *, fp8_products: bool = True) -> None:
        """`sample` returns the largest sample of a recipe's data; `fp8_products`: the GPU supports them."""
        self._recipe, self._sample, self._fp8_products = recipe, sample, fp8_products
        self._structures: dict[Any, _Structure] = {}
        self._traces: dict[Any, Trace] = {}

    @cached_property
    def _item(self) -> Any:
        try:
            return self._sample(self._new_recipe())
        except Exception as error:  # for instance because the data was not prepared
            raise CannotTrace(f"no sample: {describe_exception(error)}") from error

    def blocks(self, settings: Settings) -> BlocksOnHost:
        """Returns the blocks of the model that could be stored in host memory."""
        structure = self._structure(settings)
        return movable_blocks(structure.module, structure.blocks, settings)[1]

    def has_blocks(self, settings: Settings) -> bool:
        """Whether the model has repeated blocks."""
        return bool(self._structure(settings).blocks)

    def has_frozen_linears(self, settings: Settings) -> bool:
        """Whether base_precision has anything to convert."""
        return bool(self._structure(settings).linears)

    def has_own_optimizer(self, settings: Settings) -> bool:
        """Whether the recipe may create its own optimizer."""
        return type(self._structure(settings).recipe).optimizer is not Recipe.optimizer

    @property
    def builds_on_meta(self) -> bool:
        """Whether the recipe builds its model without weights and reads them later, so building takes no memory."""
        return type(self._recipe).weights is not Recipe.weights

    def estimate(self, settings: Settings, *, micro_batch: int, ranks: int = 1, accumulates: bool = False) -> Estimate:
        """Returns the memory per device; `accumulates`: a step has several micro-batches.

        Raises CannotTrace if the model cannot be traced.
        """
        structure, trace = self._structure(settings), self._trace(settings, micro_batch)
        parallel = settings.parallel
        demand = demand_of(structure.module, settings)
        gradients, weights = trace.gradients, demand.weights + structure.buffers
        optimizer, average = demand.optimizer, demand.average
        existing, share = float(gradients if accumulates else 0), 1.0
        if parallel.strategy in ("fsdp", "hsdp"):
            share = 0.0 if parallel.fsdp_cpu_offload else 1 / self._shards(settings, ranks)
            weights = self._sharded_weights(structure, share)
            optimizer, average, existing = int(share * optimizer), int(share * average), share * existing
        else:
            swapped = self.swapped(settings)
            if swapped.is_trained:  # the same fraction of weights, gradients, state and average is on the host
                share = 1 - swapped.saved_bytes / (weights + gradients + optimizer + average)
                weights, optimizer, average = int(share * weights), int(share * optimizer), int(share * average)
                existing *= share
            else:
                weights -= swapped.saved_bytes
            if ranks > 1:  # ddp allocates its gradient buckets before the first step
                existing = share * gradients
        fullest = trace.fullest(existing=existing, share=share)
        activations = fullest.activations // parallel.context_parallel
        update = self._temporary(structure, settings) if share else 0
        if share * gradients + update > fullest.gradients + activations:
            return Estimate(weights, int(share * gradients), optimizer, average, update, WORKSPACE)
        return Estimate(weights, fullest.gradients, optimizer, average, activations, WORKSPACE)

    def work(self, settings: Settings, micro_batch: int) -> Work:
        """Returns the work of the kernels of one micro-batch, including recomputation.

        Raises CannotTrace if the model cannot be traced.
        """
        return self._trace(settings, micro_batch).work

    def trained_weights(self, settings: Settings) -> int:
        """Returns the number of trained weights."""
        return self._structure(settings).trained_weights

    def gathered_bytes(self, settings: Settings) -> int:
        """Returns the bytes of the weights that fsdp gathers."""
        return self._structure(settings).gathered_bytes(compute_type(settings.precision))

    def num_blocks(self, settings: Settings) -> int:
        """Returns the number of repeated blocks."""
        return len(self._structure(settings).blocks)

    def least(self, settings: Settings) -> int:
        """Returns the bytes of weights and gradients, without tracing: a lower bound without sharding or block swap."""
        demand = demand_of(self._structure(settings).module, settings)
        optimizer = 0 if self.has_own_optimizer(settings) else demand.optimizer
        return demand.weights + demand.gradients + demand.average + optimizer

    def swapped(self, settings: Settings) -> BlocksOnHost:
        """Returns the blocks that are stored in host memory with these settings."""
        requested = settings.parallel.blocks_on_host
        if requested == 0:
            return BlocksOnHost((), NUM_SLOTS)
        blocks = self.blocks(settings)
        total = len(blocks.movable_bytes)
        return replace(blocks, num=total if requested == "auto" else min(requested, total))

    @staticmethod
    def _shards(settings: Settings, ranks: int) -> int:
        size = settings.parallel.shard_size
        return size if isinstance(size, int) else ranks

    @staticmethod
    def _sharded_weights(structure: _Structure, share: float) -> int:
        """Returns the bytes of the shards and, at the peak, of unsharded weights and gradients.

        At the peak, the weights outside of blocks are gathered, and a trained weight of a block takes 10 bytes: the
        weights and gradients of the block and the weights of the next block in 16 bit (2 bytes each), and the gradients
        of the previous block in 32 bit.
        """
        exact = set(structure.exact)
        whole = sum(weight.nbytes for name, weight in structure.module.named_parameters() if name in exact)
        rest = sum(weight.nbytes for weight in structure.module.parameters()) - whole
        inside = {weight for block in structure.blocks for weight in block.parameters()}
        outside = sum(2 * weight.numel() for weight in structure.module.parameters() if weight not in inside)
        at_work = max(
            (
                sum(10 * weight.numel() if weight.requires_grad else 2 * weight.nbytes for weight in block.parameters())
                for block in structure.blocks
            ),
            default=0,
        )
        return int(whole + share * rest) + outside + at_work + structure.buffers

    @staticmethod
    def _temporary(structure: _Structure, settings: Settings) -> int:
        per_element = _TEMPORARY.get(settings.optim.optimizer.lower(), 0)
        trained = (weight.numel() for weight in structure.module.parameters() if weight.requires_grad)
        return per_element * max(trained, default=0)

    def _structure(self, settings: Settings) -> _Structure:
        precision = settings.precision
        key = (precision.base_precision, precision.mixed_precision, precision.dtype)
        if key not in self._structures:
            self._structures[key] = self._build(settings)
        return self._structures[key]

    def _build(self, settings: Settings) -> _Structure:
        if not self._recipe.predicts_memory:
            raise CannotTrace("it uses modules that are not part of the trained model")
        before = torch.get_default_dtype()
        torch.set_default_dtype(weight_type(settings.precision))
        try:
            recipe = self._new_recipe(settings)
            with torch.device("meta"):
                module = build_model(recipe)
            exact = list(recipe.full_precision(module))
            cast_weights(module, weight_type(settings.precision), compute_type(settings.precision), exact)
            module.train()
            own_blocks = recipe.blocks(module)
            blocks = list(own_blocks) if own_blocks is not None else repeated_blocks(module)
            linears = recipe.frozen_linears("model", module)
            linears = frozen_linears(module, blocks, exact) if linears is None else list(linears)
            if settings.precision.base_precision != "auto" and linears:
                kind = settings.precision.base_precision
                quantize(module, linears, kind, fp8_products=self._fp8_products)
            return _Structure(recipe, module, blocks, linears, exact)
        except Exception as error:
            raise CannotTrace(describe_exception(error)) from error
        finally:
            torch.set_default_dtype(before)

    def _new_recipe(self, settings: Settings | None = None) -> Recipe:
        """Returns a copy of the recipe, because its methods store tensors without data on it."""
        recipe = copy(self._recipe)
        recipe.is_estimate = True
        if settings is not None:
            recipe.base_precision = settings.precision.base_precision
            recipe.global_batch = settings.batch.batch_size
            recipe.flash_attention = compute_type(settings.precision) is not None
        return recipe

    def _trace(self, settings: Settings, micro_batch: int) -> Trace:
        precision = settings.precision
        key = (
            *(precision.base_precision, precision.mixed_precision, precision.dtype, micro_batch),
            *(precision.activation_checkpointing, precision.recompute_every),
        )
        if key not in self._traces:
            self._traces[key] = self._new_trace(settings, micro_batch)
        return self._traces[key]

    def _new_trace(self, settings: Settings, micro_batch: int) -> Trace:
        """Traces the model with a few blocks and extrapolates to all; if that fails, traces all blocks."""
        precision, num = settings.precision, len(self._structure(settings).blocks)
        period = precision.recompute_every if precision.activation_checkpointing else 1
        few = max(2, period)
        if num > few + period and _container(self._structure(settings)) is not None:
            try:
                short, longer = (self._trace_blocks(settings, micro_batch, some) for some in (few, few + period))
                return extended(short, longer, (num - few - period) / period)
            except CannotTrace:  # the model expects all blocks
                pass
        return self._trace_blocks(settings, micro_batch, num)

    def _trace_blocks(self, settings: Settings, micro_batch: int, num: int) -> Trace:
        """Traces a step. If groups of weights are trained in turn, returns the peaks over the steps of all groups."""
        groups = check_groups(self._recipe.groups())
        if not groups:
            return self._trace_group(settings, micro_batch, num, None)
        traces = [self._trace_group(settings, micro_batch, num, group) for group in groups]
        moments = [moment for trace in traces for moment in trace.moments]
        return Trace(moments, max(trace.gradients for trace in traces))

    def _trace_group(self, settings: Settings, micro_batch: int, num: int, group: Group | None) -> Trace:
        structure = _shortened(self._build(settings), num)  # a traced model cannot be used again
        recipe, precision = structure.recipe, settings.precision
        if group is not None:
            recipe.group = group.name
            for name, weight in structure.module.named_parameters():
                weight.requires_grad_(weight.requires_grad and group.holds(name))
        if precision.activation_checkpointing:
            for block in structure.blocks[:: precision.recompute_every] or [structure.module]:
                selective = precision.activation_checkpointing == "selective" and why_not_selective(block) is None
                recompute_activations(block, selective=selective)
        _fill_tables(precision.base_precision, compute_type(precision) or weight_type(precision))
        before = torch.get_default_dtype()
        torch.set_default_dtype(weight_type(precision))
        try:
            batch = recipe.collate([self._item] * micro_batch)

            def loss(model: nn.Module, data: Any) -> Tensor:
                noise = Noise(settings.run.seed, torch.arange(micro_batch))
                if recipe.coupled:
                    return recipe.couple(recipe.embed(model, data, noise)).total
                return recipe.loss(model, data, noise).total

            return trace_step(structure.module, loss, batch, compute_type(precision))
        finally:
            torch.set_default_dtype(before)


def _container(structure: _Structure) -> nn.ModuleList | nn.Sequential | None:
    """Returns the list that contains exactly the blocks, if they all have the same structure."""
    kinds = {
        tuple((name, weight.shape, weight.dtype, weight.requires_grad) for name, weight in block.named_parameters())
        for block in structure.blocks
    }
    for module in structure.module.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and list(module) == list(structure.blocks):
            return module if len(kinds) == 1 else None
    return None


def _shortened(structure: _Structure, num: int) -> _Structure:
    """Returns the model with its first `num` blocks only."""
    container = _container(structure)
    if container is None or num >= len(structure.blocks):
        return structure
    del container[num:]
    return replace(structure, blocks=structure.blocks[:num])


def _fill_tables(base_precision: str, dtype: torch.dtype) -> None:
    """Decodes a few numbers before tracing, so that the decoder caches real lookup tables and not fake tensors."""
    if base_precision in ("auto", "bf16"):
        return
    encoded = FORMATS[base_precision].encode(torch.ones(1, 64))
    FORMATS[base_precision].decode(encoded.codes, encoded.scales, 64, dtype)
