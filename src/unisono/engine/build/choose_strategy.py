"""Chooses the strategy of a run: the strategy in the settings or, with `--strategy auto`, one that fits in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from unisono.errors import ConfigError
from unisono.parallel.strategy import Placement
from unisono.planning.choose import Demand, check_shard_size, choose_shard_size, choose_strategy, divisors
from unisono.settings import ParallelSettings, Settings

_STATE_PER_WEIGHT = {"adamw8bit": 0.51, "adamw4bit": 0.27, "adafactor": 0.01, "prodigy": 4}
"""Size of the optimizer's state as a multiple of the trained weights."""


@dataclass(frozen=True)
class ChosenStrategy:
    """The strategy of a run, and the reason for choosing it."""

    name: str
    reason: str  # why it was chosen, shown in the banner
    shard_size: int | None = None  # ranks that hold one copy of the weights; only for fsdp


def check_strategy(settings: ParallelSettings, placement: Placement) -> None:
    """Rejects a strategy or shard_size that does not match the number of ranks, before any work is done."""
    name, ranks = settings.strategy, placement.world
    if name in ("single", "dp") and ranks > 1:
        raise ConfigError(f"strategy {name} uses one process, but {ranks} were started; use ddp or fsdp")
    _requested_shard_size(settings, placement)


def _requested_shard_size(settings: ParallelSettings, placement: Placement) -> int | None:
    """Returns the shard_size in the settings, in ranks; None if it depends on memory."""
    size, ranks = settings.shard_size, placement.world
    if settings.strategy == "hsdp" and size == "auto":
        if len(set(placement.nodes)) < 2:
            sizes = ", ".join(map(str, divisors(ranks)[:-1]))
            remedy = f"use {sizes}" if sizes else "start more ranks, or use strategy fsdp"
            raise ConfigError(f"strategy hsdp on one machine needs a shard_size; with {ranks} ranks {remedy}")
        size = "node"
    if size == "auto":
        return None
    return check_shard_size(size, ranks=ranks, nodes=placement.nodes)


def choose_run_strategy(model: nn.Module, settings: Settings, placement: Placement) -> ChosenStrategy:
    """Returns the strategy in the settings, or a strategy that fits, with the reason that the banner shows."""
    check_strategy(settings.parallel, placement)
    name: str = settings.parallel.strategy
    num_devices = len(placement.devices)
    if name == "auto" and settings.parallel.blocks_on_host != 0 and placement.world > 1:
        name, reason = "ddp", "blocks_on_host works with ddp, not with fsdp"
    elif name == "auto" and (settings.parallel.shard_size == "auto" or placement.world == 1):
        device_memory = _device_memory(placement)
        demand = demand_of(model, settings)
        name, reason = choose_strategy(ranks=placement.world, demand=demand, device_memory=device_memory)
    elif name in ("auto", "hsdp"):
        name, reason = "fsdp", "as requested"
    elif name == "dp":
        name, reason = (
            ("single", "dp on one device is the same as single")
            if num_devices == 1
            else ("dp", f"{num_devices} GPUs from one process (not tested on more than one GPU, unlike ddp)")
        )
    else:
        reason = "as requested"
    if name != "fsdp":
        return ChosenStrategy(name, reason)
    return _with_shard_size(reason, model, settings, placement)


def _with_shard_size(reason: str, model: nn.Module, settings: Settings, placement: Placement) -> ChosenStrategy:
    size = _requested_shard_size(settings.parallel, placement)
    if size is None:
        size = choose_shard_size(
            ranks=placement.world,
            nodes=placement.nodes,
            demand=demand_of(model, settings),
            device_memory=_device_memory(placement),
        )
    if size < placement.world:
        reason += f"; {placement.world // size} copies of the weights, each sharded over {size} ranks"
    return ChosenStrategy("fsdp", reason, size)


def demand_of(model: nn.Module, settings: Settings) -> Demand:
    """Returns the memory that a whole replica of the model takes on a device, without activations."""
    return Demand.of(
        trainable_bytes=_num_bytes(model, lambda parameter: parameter.requires_grad),
        other_bytes=_num_bytes(model, lambda parameter: not parameter.requires_grad),
        optimizer_slots=state_per_weight(settings),
        ema=settings.ema.ema_decay > 0,
    )


def state_per_weight(settings: Settings) -> float:
    """Returns the size of the optimizer's state as a multiple of the trained weights."""
    optimizer = settings.optim.optimizer.lower()
    return _STATE_PER_WEIGHT.get(optimizer, 2 if "adam" in optimizer else 1)


def _device_memory(placement: Placement) -> int | None:
    """Returns the bytes of memory of the run's smallest GPU, the same on every rank; None on the CPU."""
    if placement.device.type != "cuda":
        return None
    here = int(torch.cuda.get_device_properties(placement.device).total_memory)
    sizes = [here] * placement.world
    if placement.world > 1:
        dist.all_gather_object(sizes, here)
    return min(sizes)


def _num_bytes(model: nn.Module, is_counted: Callable[[nn.Parameter], bool]) -> int:
    parameters = (parameter for parameter in model.parameters() if is_counted(parameter))
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
