"""Chooses a strategy by arithmetic on bytes, and explains the choice."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.formatting import format_bytes

_ROOM_FOR_ACTIVATIONS = 0.4  # fraction of a device's memory to leave free for activations


@dataclass(frozen=True)
class Demand:
    """The memory of one whole replica, in bytes, without activations."""

    weights: int
    gradients: int
    optimizer: int
    average: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.average

    @classmethod
    def of(cls, *, trainable_bytes: int, other_bytes: int, optimizer_slots: float, ema: bool) -> Demand:
        """Computes the demand from a model's sizes; `optimizer_slots`: tensors per trained weight (Adam: 2)."""
        return cls(
            weights=trainable_bytes + other_bytes,
            gradients=trainable_bytes,
            optimizer=int(optimizer_slots * trainable_bytes),
            average=trainable_bytes if ema else 0,
        )


def choose_strategy(*, ranks: int, demand: Demand, device_memory: int | None) -> tuple[str, str]:
    """The strategy that `auto` chooses, and the reason."""
    if ranks == 1:
        return "single", "one device"
    need = f"weights, gradients, optimizer and average take {format_bytes(demand.total)}"
    if device_memory is None:
        return "ddp", f"{need}, on the CPU"
    room = device_memory * (1 - _ROOM_FOR_ACTIVATIONS)
    available = f"{format_bytes(device_memory)} per device"
    if demand.total <= room:
        return "ddp", f"{need} of {available}, which leaves room for activations"
    return "fsdp", f"{need}, too much for {available} with room for activations"
