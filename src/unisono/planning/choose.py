"""Chooses a strategy from sizes in bytes, and explains the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from unisono.errors import ConfigError
from unisono.formatting import format_bytes

ROOM_FOR_ACTIVATIONS = 0.4
"""Fraction of a device's memory to leave free for activations."""


@dataclass(frozen=True)
class Demand:
    """The memory, in bytes, that one unsharded replica needs without activations."""

    weights: int
    gradients: int
    optimizer: int
    average: int

    @property
    def total(self) -> int:
        """The sum of all parts in bytes."""
        return self.weights + self.gradients + self.optimizer + self.average

    @classmethod
    def of(cls, *, trainable_bytes: int, other_bytes: int, optimizer_slots: float, ema: bool) -> Demand:
        """Computes the demand from a model's sizes. `optimizer_slots` is the number of state tensors per weight."""
        return cls(
            weights=trainable_bytes + other_bytes,
            gradients=trainable_bytes,
            optimizer=int(optimizer_slots * trainable_bytes),
            average=trainable_bytes if ema else 0,
        )


def choose_strategy(*, ranks: int, demand: Demand, device_memory: int | None) -> tuple[str, str]:
    """Returns the strategy that `auto` chooses, and the reason."""
    if ranks == 1:
        return "single", "one device"
    need = f"weights, gradients, optimizer and average take {format_bytes(demand.total)}"
    if device_memory is None:
        return "ddp", f"{need}, on the CPU"
    room = device_memory * (1 - ROOM_FOR_ACTIVATIONS)
    available = f"{format_bytes(device_memory)} per device"
    if demand.total <= room:
        return "ddp", f"{need} of {available}, which leaves room for activations"
    return "fsdp", f"{need}, which leaves too little of {available} for activations"


def check_shard_size(shard_size: int | Literal["auto", "node", "all"], *, ranks: int, nodes: Sequence[int]) -> int:
    """Returns over how many ranks one copy of the weights is sharded; rejects a number that does not divide `ranks`.

    `nodes` contains the index of each rank's machine, and is empty for a single machine. auto counts as all here.
    """
    if shard_size in ("auto", "all"):
        return ranks
    sizes = divisors(ranks)
    or_sizes = f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}" if len(sizes) > 1 else "1"
    if shard_size == "node":
        per_machine = [len(list(ranks_there)) for _, ranks_there in groupby(nodes)] or [ranks]
        if len(per_machine) > len(set(nodes)) > 0:
            raise ConfigError(
                "shard_size node: the ranks of a machine do not have consecutive numbers; start them machine by "
                f"machine (srun --distribution=block), or use {or_sizes} ranks"
            )
        if len(set(per_machine)) > 1:
            raise ConfigError(
                f"shard_size node: the machines have {', '.join(map(str, per_machine))} ranks; start the same number "
                f"on each, or use {or_sizes} ranks"
            )
        return per_machine[0]
    if ranks % int(shard_size):
        raise ConfigError(f"shard_size {shard_size} does not divide {ranks} rank{'s' * (ranks > 1)}; use {or_sizes}")
    return int(shard_size)


def divisors(number: int) -> list[int]:
    """Returns all divisors of `number` in ascending order."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def choose_shard_size(*, ranks: int, nodes: Sequence[int], demand: Demand, device_memory: int | None) -> int:
    """Returns the shard_size that `auto` chooses.

    If there are several machines and a copy of the weights fits on one machine, it is the number of ranks per machine.
    Weights are then gathered within a machine, and only gradients are sent between machines. Otherwise it is the number
    of all ranks.
    """
    if len(set(nodes)) < 2 or device_memory is None:
        return ranks
    try:
        size = check_shard_size("node", ranks=ranks, nodes=nodes)
    except ConfigError:  # the machines have different numbers of ranks, or ranks that are not consecutive
        return ranks
    return size if demand.total / size <= device_memory * (1 - ROOM_FOR_ACTIVATIONS) else ranks
