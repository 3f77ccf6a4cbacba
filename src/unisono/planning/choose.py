"""Which strategy to take: arithmetic over bytes, with the reason in words."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.formatting import format_bytes

_ROOM_FOR_ACTIVATIONS = 0.4  # part of a device's memory kept free of weights, gradients and optimizer state


@dataclass(frozen=True)
class Demand:
    """What one whole replica keeps on its device, in bytes, besides activations."""

    weights: int
    gradients: int
    optimizer: int
    average: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.average

    @classmethod
    def of(cls, *, trainable_bytes: int, other_bytes: int, optimizer_slots: float, ema: bool) -> Demand:
        """From the sizes of the model: `optimizer_slots` tensors per trainable weight (Adam keeps 2)."""
        return cls(
            weights=trainable_bytes + other_bytes,
            gradients=trainable_bytes,
            optimizer=int(optimizer_slots * trainable_bytes),
            average=trainable_bytes if ema else 0,
        )


def choose_strategy(*, ranks: int, demand: Demand, device_memory: int | None) -> tuple[str, str]:
    """The strategy for `auto`, and why."""
    if ranks == 1:
        return "single", "one device"
    need = f"weights, gradients, optimizer and average take {format_bytes(demand.total)}"
    if device_memory is None:
        return "ddp", f"{need}, on the CPU"
    room = device_memory * (1 - _ROOM_FOR_ACTIVATIONS)
    there = f"{format_bytes(device_memory)} per device"
    if demand.total <= room:
        return "ddp", f"{need} of {there}, which leaves room for activations"
    return "fsdp", f"{need}, too much for {there} with room for activations"
