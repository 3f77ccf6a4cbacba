"""The banner that a run prints at its start: devices, strategy, batch, data, and the reasons for each choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono.cluster.environment import World
from unisono.data.stream import is_stream
from unisono.engine.training_run import TrainingRun
from unisono.faults import Fault
from unisono.formatting import format_count
from unisono.observe.banner import banner, effective_batch_text
from unisono.parallel.strategy import Placement


def banner_of(run: TrainingRun, folder: str) -> str:
    """Returns the start-up banner of a run; `folder` describes its folder."""
    components, world, batch = run.components, run.rank.world, run.batch
    strategy, placement = components.strategy, components.strategy.placement
    num_samples, eval_dataset = run.datasets.num_samples, run.datasets.evaluation
    weights = sum(parameter.numel() for parameter in strategy.model.parameters())
    trainable = sum(parameter.numel() for parameter in strategy.model.parameters() if parameter.requires_grad)
    precision = run.settings.precision
    steps = f"{run.length.steps:,}"
    if components.recipe.whole_epochs:  # the user's own loop decides how many epochs there are
        steps = f"{-(-(components.recipe.samples_per_epoch or num_samples) // batch.global_batch):,} in an epoch"
    rows = {
        "processes": f"{world.size}"
        + (f" on {world.num_nodes} machines" if world.num_nodes > 1 else "")
        + (f", in groups of {placement.context} that share each sample" if placement.context > 1 else ""),
        "launcher": world.describe(),
        "device": _devices(placement.devices),
        "strategy": f"{strategy.name} ({components.why_strategy})",
        "precision": precision.dtype if precision.mixed_precision == "no" else f"{precision.mixed_precision} (mixed)",
        "effective batch": effective_batch_text(
            batch.global_batch,
            batch.micro_batch,
            batch.devices,
            batch.accumulation,
            device=_unit(placement),
        ),
        "model": f"{weights:,} parameters" + (f", {trainable:,} trained" if trainable != weights else ""),
        "data": ("a stream on each rank" if is_stream(run.datasets.train) else f"{num_samples:,} samples")
        + (f", {len(eval_dataset):,} for evaluation" if eval_dataset is not None else ""),  # type: ignore[arg-type]
        "steps": steps + (f", from {components.state.step:,}" if components.state.step else ""),
        "folder": folder,
        "in short": _in_short(strategy.name, world, placement.device, precision.mixed_precision, batch.accumulation),
    }
    return banner(rows, f"unisono: {components.recipe.title or type(components.recipe).__name__}")


def _unit(placement: Placement) -> str:
    """Returns the name of the unit that computes a share of the batch: a GPU, a rank or a group of ranks."""
    if placement.context > 1:
        return "group"
    return "GPU" if placement.device.type == "cuda" else "rank"


def _in_short(strategy: str, world: World, device: torch.device, precision: str, accumulation: int) -> str:
    """Returns the lines that guides to Accelerate tell users to look for."""
    devices = "GPU" if device.type == "cuda" else "CPU"
    kind = "none (one process)"
    if world.size > 1:
        kind = f"{'fully sharded data parallel' if strategy == 'fsdp' else 'data parallel'} ({strategy}) on {devices}s"
    return (
        f"Number of processes: {world.size}, Distributed type: {kind}\n"
        f"Mixed precision: {precision}, Gradient accumulation steps: {accumulation}\n"
        f"Main process device: {device}"
    )


def _devices(devices: Any) -> str:
    first = devices[0]
    name = torch.cuda.get_device_name(first) if first.type == "cuda" else "CPU"
    return (
        f"{first} ({name})"
        if first.type == "cuda"
        else f"CPU, {format_count(torch.get_num_threads(), 'thread')} per process"
    )


def idle_faults(faults: Sequence[Fault], world: int, steps: int) -> list[str]:
    """Returns notes on injected faults that cannot happen in this run."""
    no_such_rank = [fault for fault in faults if fault.rank is not None and fault.rank >= world]
    no_such_step = [fault for fault in faults if fault.step > steps]
    return [
        *(f"inject: {fault.text} will not happen, the run has {format_count(world, 'rank')}" for fault in no_such_rank),
        *(f"inject: {fault.text} will not happen, the run has {format_count(steps, 'step')}" for fault in no_such_step),
    ]
