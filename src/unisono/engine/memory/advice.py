"""Advice for a run in which not even one sample fits: how much memory is missing, and which settings free how much."""

from __future__ import annotations

import re
from typing import Any

import torch

from unisono.engine.step.components import Components
from unisono.engine.step.out_of_memory import IN_COUPLE
from unisono.formatting import format_bytes
from unisono.parallel.strategy import local_part
from unisono.planning.blocks_on_host import BlocksOnHost
from unisono.planning.choose import Demand

_AMOUNT = r"([\d.]+) (GiB|MiB|KiB|bytes)"
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}


def advice(rank: int, message: str, components: Components, *, recomputes: bool, flags: str | None = None) -> str:
    """Returns the error text: the memory that is missing for one sample, and the memory that each remedy would free.

    `flags`: settings with which the run is predicted to fit.
    """
    placement, strategy = components.strategy.placement, components.strategy
    demand = Demand(
        weights=_bytes(strategy.model.parameters()) - components.blocks_on_host.saved_bytes,
        gradients=_bytes(parameter for _, parameter in strategy.parameters),
        optimizer=sum(_bytes(group.optimizer.tensors().values()) for group in components.groups),
        average=sum(group.ema.num_bytes for group in components.groups if group.ema is not None),
    )
    where = f" on rank {rank}" if placement.world > 1 else ""
    if message.startswith(IN_COUPLE):
        return (
            f"the loss of a whole global batch ({components.state.global_batch} samples) does not fit{where}, even "
            f"with the activations of a single sample: {message}; use a smaller global_batch_size"
            + ("" if components.recipe.couples_by_rows else ", or define couple_rows(), whose work the ranks divide")
        )
    begin = f"even one sample does not fit{where}: {message}"
    requested, free = _amount(rf"allocate {_AMOUNT}", message), _free(message)
    if requested is not None and free is not None:
        amounts = f"{format_bytes(requested)} more were needed, {format_bytes(free)} were free"
        begin = f"even one sample does not fit{where}: {amounts}"
        missing = requested - free
        begin += f", so at least {format_bytes(missing)} are missing" if missing > 0 else ", but fragmented"
    usage = f"weights, gradients, optimizer state and average take {format_bytes(demand.total)} on each device"
    remedies = []
    if placement.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(placement.device)
        activations = max(0, peak - demand.total)
        usage += f", activations and the rest {format_bytes(activations)} when it failed"
        if not recomputes:
            remedies.append(f"activation_checkpointing (frees most of the activations' {format_bytes(activations)})")
    elif not recomputes:
        remedies.append("activation_checkpointing")
    if not strategy.sharded and (remedy := _more_blocks_on_host(components.blocks_on_host, requested, free)):
        remedies.append(remedy)
    if not strategy.sharded:
        num = max(placement.world, 2)
        each = format_bytes(demand.total // num)
        remedies.append(f"strategy fsdp on {num} GPUs ({each} each instead of {format_bytes(demand.total)})")
    if not strategy.settings.fsdp_cpu_offload:
        remedies.append(f"fsdp with fsdp_cpu_offload (frees {format_bytes(demand.total)}, summed over all GPUs)")
    if components.recipe.supports_context_parallel:
        size = 2 * placement.context
        remedies.append(f"context_parallel {size} (divides the activations of a sample between {size} GPUs)")
    if demand.average:
        remedies.append(f"ema_decay 0 (saves {format_bytes(demand.average)})")
    predicted = f"{flags}. " if flags else ""
    return f"{begin}; {usage}. {predicted}What would help: {', '.join(remedies)}"


def _more_blocks_on_host(blocks: BlocksOnHost, requested: int | None, free: int | None) -> str | None:
    """Returns the fewest blocks on the host that free the missing memory; all blocks if that amount is unknown."""
    missing = blocks.device_bytes if requested is None or free is None else max(requested - free, 1)
    more = blocks.fewest(blocks.device_bytes - missing)
    freed = blocks.device_bytes - more.device_bytes
    return f"blocks_on_host {more.num} (frees {format_bytes(freed)})" if freed > 0 else None


def _free(message: str) -> int | None:
    """Returns the free memory of the device, or of the part of it that this process may use."""
    free, allowed = _amount(rf"{_AMOUNT} is free", message), _amount(rf"{_AMOUNT} allowed", message)
    if free is None or allowed is None:
        return free
    taken = _amount(rf"memory {_AMOUNT} is allocated by PyTorch", message) or 0
    return min(free, max(0, allowed - taken))


def _amount(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])


def _bytes(tensors: Any) -> int:
    return sum(local_part(tensor).numel() * tensor.element_size() for tensor in tensors)
