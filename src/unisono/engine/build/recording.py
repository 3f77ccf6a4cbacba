"""Decides whether the steps of a run are recorded as CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from unisono.engine.recipe import Recipe
from unisono.errors import ConfigError
from unisono.parallel.strategy import Strategy
from unisono.settings import Settings


@dataclass(frozen=True)
class Recording:
    """Whether steps are recorded as CUDA graphs."""

    captures: bool  # whether steps are recorded
    is_possible: bool  # whether `--cuda_graph` would work, if steps are not recorded
    remarks: list[str] = field(default_factory=list)


def plan_recording(recipe: Recipe, settings: Settings, device: torch.device, strategy: str) -> Recording:
    """Decides whether to record; rejects `--cuda_graph` for a run that cannot be recorded."""
    on_gpu, is_requested = device.type == "cuda", settings.precision.cuda_graph
    captures = is_requested and on_gpu
    obstacle = _obstacle(recipe, settings, strategy)
    if obstacle is not None and (captures or (is_requested and (recipe.coupled or recipe.groups()))):
        raise ConfigError(obstacle)
    remarks = ["cuda_graph: there is no GPU here; steps run as usual"] if is_requested and not on_gpu else []
    is_possible = on_gpu and not captures and obstacle is None and not recipe.many_shapes
    return Recording(captures, is_possible, remarks)


def check_strategy_records(strategy: Strategy) -> None:
    """Keeps the strategy's gradients at fixed addresses, which recording requires; rejects a strategy that cannot."""
    if not strategy.fix_gradient_addresses():
        raise ConfigError(
            "cuda_graph cannot record ddp with find_unused_parameters, static_graph or sync_batch_norm, nor without "
            "gradient_as_bucket_view; remove these, or cuda_graph"
        )


def _obstacle(recipe: Recipe, settings: Settings, strategy: str) -> str | None:
    if strategy not in ("single", "ddp"):
        return f"cuda_graph works with strategy single and ddp, not with {strategy}; remove one of them"
    if settings.precision.activation_checkpointing:
        # Activation checkpointing saves and restores the RNG state, which cannot be recorded.
        return "cuda_graph cannot record activation_checkpointing; remove one of them"
    if settings.precision.activation_memory_gb is not None:
        return "cuda_graph cannot record blocks that recompute (activation_memory_gb); remove one of them"
    if settings.parallel.blocks_on_host != 0:
        return "cuda_graph always reads the same memory, and blocks_on_host replaces weights; remove one of them"
    if recipe.groups():
        return "cuda_graph cannot record several groups of weights that are trained in turn; remove cuda_graph"
    if recipe.coupled:
        return "cuda_graph cannot record a loss that compares samples with each other; remove cuda_graph"
    if recipe.refresh_every:
        return "cuda_graph always reads the same memory, and this run replaces its samples; remove cuda_graph"
    return None
