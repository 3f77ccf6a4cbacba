"""Chooses the strategy of a run: the one in the settings, or by memory with `--strategy auto`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from unisono.errors import ConfigError
from unisono.parallel.strategy import Placement
from unisono.planning.choose import Demand, choose_strategy
from unisono.settings import Settings

_STATE_PER_WEIGHT = {"adamw8bit": 0.51, "adamw4bit": 0.27, "adafactor": 0.01, "prodigy": 4}
"""Size of the optimizer's state as a multiple of the trained weights."""


def choose_run_strategy(model: nn.Module, settings: Settings, placement: Placement) -> tuple[str, str]:
    """The name of the strategy, and the reason that the banner shows."""
    name, ranks = settings.parallel.strategy, placement.world
    if name == "auto":
        return _choose_by_memory(model, settings, placement)
    if name in ("single", "dp") and ranks > 1:
        raise ConfigError(f"strategy {name} uses one process, but {ranks} were started; use ddp or fsdp")
    if name == "dp" and len(placement.devices) == 1:
        return "single", "dp on one device is single"
    if name == "dp":
        num_gpus = len(placement.devices)
        return "dp", f"{num_gpus} GPUs from one process (not tested on more than one GPU; ddp is)"
    return name, "as requested"


def _choose_by_memory(model: nn.Module, settings: Settings, placement: Placement) -> tuple[str, str]:
    optimizer = settings.optim.optimizer.lower()
    demand = Demand.of(
        trainable_bytes=_num_bytes(model, lambda parameter: parameter.requires_grad),
        other_bytes=_num_bytes(model, lambda parameter: not parameter.requires_grad),
        optimizer_slots=_STATE_PER_WEIGHT.get(optimizer, 2 if "adam" in optimizer else 1),
        ema=settings.ema.ema_decay > 0,
    )
    on_gpu = placement.device.type == "cuda"
    memory = torch.cuda.get_device_properties(placement.device).total_memory if on_gpu else None
    return choose_strategy(ranks=placement.world, demand=demand, device_memory=memory)


def _num_bytes(model: nn.Module, is_counted: Callable[[nn.Parameter], bool]) -> int:
    parameters = (parameter for parameter in model.parameters() if is_counted(parameter))
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
