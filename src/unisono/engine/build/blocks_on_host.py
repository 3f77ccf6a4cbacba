"""Decides which blocks are stored in host memory (`--blocks_on_host`), before any weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn

from unisono.engine.build.choose_strategy import demand_of, state_per_weight
from unisono.errors import ConfigError
from unisono.formatting import format_bytes
from unisono.parallel.blocks.swap import NUM_SLOTS, frozen_bytes, trained_bytes
from unisono.parallel.strategy import Placement
from unisono.planning.blocks_on_host import BlocksOnHost
from unisono.planning.choose import ROOM_FOR_ACTIVATIONS
from unisono.planning.host import free_host_memory
from unisono.settings import Settings


@dataclass(frozen=True)
class SwapPlan:
    """The blocks to keep in host memory and copy to the device in turn."""

    sizes: BlocksOnHost
    blocks: Sequence[nn.Module]
    remarks: list[str] = field(default_factory=list)


def plan_blocks_on_host(
    model: nn.Module, blocks: Sequence[nn.Module], settings: Settings, placement: Placement
) -> SwapPlan:
    """Chooses the blocks that are stored in host memory; every rank calls it.

    Raises ConfigError if the model has too few such blocks, or if host memory is too small.
    """
    candidates, sizes = movable_blocks(model, blocks, settings)
    requested = settings.parallel.blocks_on_host
    if requested == 0:
        return SwapPlan(sizes, [])
    if not blocks:
        raise ConfigError("blocks_on_host: the model has no repeated blocks; remove it, or define Recipe.blocks")
    if sizes.is_trained and settings.parallel.find_unused_parameters and placement.world > 1:
        raise ConfigError(
            "find_unused_parameters does not work with trained blocks on the host and several ranks; remove it, or "
            "blocks_on_host"
        )
    if requested == "auto":
        sizes = _fewest_that_fit(model, sizes, settings, placement)
    elif requested > len(candidates):
        raise ConfigError(
            f"blocks_on_host {requested}: the model has {len(candidates)} blocks with "
            f"{'weights of their own' if sizes.is_trained else 'frozen weights'}; use at most {len(candidates)}"
        )
    else:
        sizes = replace(sizes, num=requested)
    chosen = [candidates[number] for number in sizes.chosen]
    _check_host_memory(chosen, sizes, placement)
    return SwapPlan(sizes, chosen, [_remark(sizes, placement, is_auto=requested == "auto")])


def movable_blocks(
    model: nn.Module, blocks: Sequence[nn.Module], settings: Settings
) -> tuple[list[nn.Module], BlocksOnHost]:
    """Returns the blocks that can be stored in host memory, and their sizes.

    If the frozen weights of the blocks take more memory than the trained weights (a LoRA), only the frozen weights move
    to the host. Otherwise (a full fine-tune), all weights move, with their gradients and optimizer state.
    """
    frozen, trained = frozen_bytes(model, blocks), trained_bytes(model, blocks)
    if sum(trained) <= sum(frozen):
        numbers = [number for number, size in enumerate(frozen) if size]
        return [blocks[number] for number in numbers], BlocksOnHost([frozen[number] for number in numbers], NUM_SLOTS)
    numbers = [number for number, size in enumerate(trained) if size]
    per_weight = 2 + state_per_weight(settings) + (settings.ema.ema_decay > 0)
    moved = [frozen[number] + int(per_weight * trained[number]) for number in numbers]
    computing = [frozen[number] + 2 * trained[number] for number in numbers]
    return [blocks[number] for number in numbers], BlocksOnHost(moved, NUM_SLOTS, slot_bytes=computing)


def _fewest_that_fit(model: nn.Module, sizes: BlocksOnHost, settings: Settings, placement: Placement) -> BlocksOnHost:
    if placement.device.type != "cuda":
        return sizes
    others = demand_of(model, settings).total - sum(sizes.movable_bytes)
    fewest = sizes.fewest(_usable_memory(placement.device) - others)
    if placement.world == 1:
        return fewest
    # All ranks swap the same blocks, because they receive weights in the same order. So the fullest device decides.
    numbers = [0] * placement.world
    dist.all_gather_object(numbers, fewest.num)
    return replace(fewest, num=max(numbers))


def _usable_memory(device: torch.device) -> float:
    """Returns the bytes of free device memory that this process may use for everything except activations."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total
    return min(free, allowed) - ROOM_FOR_ACTIVATIONS * min(total, allowed)


def _check_host_memory(chosen: Sequence[nn.Module], sizes: BlocksOnHost, placement: Placement) -> None:
    """Rejects more blocks than host memory can hold; blocks that the recipe has already loaded there do not count."""
    is_on_meta = any(parameter.is_meta for block in chosen for parameter in block.parameters())
    weights = 0 if is_on_meta else sum(parameter.nbytes for block in chosen for parameter in block.parameters())
    need = max(0, sizes.host_bytes - weights) * placement.local_world
    machines: list[tuple[int, int]] = [(need, free_host_memory())]
    if placement.world > 1:  # checked before any rank loads weights, so that all ranks raise the error together
        machines = [(0, 0)] * placement.world
        dist.all_gather_object(machines, (need, free_host_memory()))
    for need, free in machines:
        if need > free:
            ranks = f" for {placement.local_world} ranks" if placement.local_world > 1 else ""
            raise ConfigError(
                f"blocks_on_host {sizes.num} needs {format_bytes(need)} of host memory{ranks}, and "
                f"{format_bytes(free)} are free; use fewer blocks, or a machine with more memory"
            )


def _remark(sizes: BlocksOnHost, placement: Placement, *, is_auto: bool) -> str:
    total = len(sizes.movable_bytes)
    if not sizes.num:
        why = "on the CPU nothing is saved" if placement.device.type != "cuda" else "everything fits"
        return f"blocks_on_host auto: all {total} blocks stay on the device ({why})"
    name = f"blocks_on_host {'auto: ' if is_auto else ''}{sizes.num} of {total} blocks"
    room = f", with {ROOM_FOR_ACTIVATIONS:.0%} of the device's memory left for activations" if is_auto else ""
    if sizes.saved_bytes <= 0:
        return f"{name} saves no memory: {NUM_SLOTS} of them are on the device at any time; use more, or remove it"
    kind = "weights, gradients and optimizer state" if sizes.is_trained else "frozen weights"
    return (
        f"{name}: {format_bytes(sizes.host_bytes)} of {kind} are stored in host memory, which saves "
        f"{format_bytes(sizes.saved_bytes)} on the device{room}"
    )
