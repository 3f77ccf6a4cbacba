"""The banner a run starts with: what was found, what was decided, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from unisono.cluster.environment import World
from unisono.engine.batch import BatchPlan
from unisono.engine.build import Parts
from unisono.engine.length import Length
from unisono.observe.banner import banner, effective_batch_text
from unisono.settings import Settings


def opening(
    parts: Parts,
    settings: Settings,
    world: World,
    batch: BatchPlan,
    length: Length,
    num_samples: int,
    eval_data: Any,
    folder: Path,
    why: str,
) -> list[str]:
    """The banner's lines."""
    strategy, place = parts.strategy, parts.strategy.place
    weights = sum(parameter.numel() for parameter in strategy.model.parameters())
    trainable = sum(parameter.numel() for parameter in strategy.model.parameters() if parameter.requires_grad)
    precision = settings.precision
    steps = f"{length.steps:,}"
    if parts.recipe.whole_epochs:  # how many of them is decided by a loop of the user's
        steps = f"{-(-num_samples // batch.global_batch):,} in an epoch"
    rows = {
        "processes": f"{world.size}" + (f" on {world.num_nodes} machines" if world.num_nodes > 1 else ""),
        "launcher": world.describe(),
        "device": _devices(place.devices),
        "strategy": f"{strategy.name} ({parts.why_strategy})",
        "precision": precision.dtype if precision.mixed_precision == "no" else f"{precision.mixed_precision} (mixed)",
        "effective batch": effective_batch_text(
            batch.global_batch,
            batch.micro_batch,
            batch.devices,
            batch.accumulation,
            device="GPU" if place.device.type == "cuda" else "rank",
        ),
        "model": f"{weights:,} parameters" + (f", {trainable:,} trained" if trainable != weights else ""),
        "data": f"{num_samples:,} samples" + (f", {len(eval_data):,} for evaluation" if eval_data is not None else ""),
        "steps": steps + (f", from {parts.state.step:,}" if parts.state.step else ""),
        "folder": f"{folder} ({why})",
        "in short": _in_short(strategy.name, world, place.device, precision.mixed_precision, batch.accumulation),
    }
    return [banner(rows, f"unisono: {type(parts.recipe).__name__}")]


def _in_short(strategy: str, world: World, device: torch.device, precision: str, accumulation: int) -> str:
    """What guides to Accelerate tell people to look for, in their words."""
    if strategy == "fsdp":
        kind = "FSDP"
    elif world.size > 1:
        kind = "MULTI_GPU" if device.type == "cuda" else "MULTI_CPU"
    else:
        kind = "NO"
    return (
        f"Number of processes: {world.size}, Distributed type: DistributedType.{kind}\n"
        f"Mixed precision: {precision}, Gradient accumulation steps: {accumulation}\n"
        f"Main process device: {device}"
    )


def _devices(devices: Any) -> str:
    first = devices[0]
    name = torch.cuda.get_device_name(first) if first.type == "cuda" else "CPU"
    return f"{first} ({name})" if first.type == "cuda" else f"CPU, {torch.get_num_threads()} threads per process"
