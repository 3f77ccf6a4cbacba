"""Data types of weights and computation, and the loss scale that fp16 needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from unisono.settings import PrecisionSettings

_TYPES = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
_GROW_EVERY = 2000  # good steps before the scale is doubled again, as torch.amp.GradScaler does


def compute_type(settings: PrecisionSettings) -> torch.dtype | None:
    """Returns the 16-bit type of mixed precision, or None."""
    return _TYPES[settings.mixed_precision]


def weight_type(settings: PrecisionSettings) -> torch.dtype:
    """Returns the type of weights, gradients and optimizer state."""
    return torch.float64 if settings.dtype == "float64" else torch.float32


def autocast(device: torch.device, settings: PrecisionSettings) -> AbstractContextManager[Any]:
    """Returns the autocast context in which a recipe computes its loss."""
    dtype = compute_type(settings)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


class LossScale:
    """The loss scale, which prevents small fp16 gradients from vanishing: halved on overflow, doubled after good steps.

    It is updated on the device. All ranks see the same `found_inf`, so they have the same scale.
    """

    def __init__(self, device: torch.device, start: float = 2.0**16) -> None:
        self.value = torch.full((), start, device=device, dtype=torch.float32)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, found_inf: Tensor) -> None:
        """Called after each step: halves the scale if the step overflowed, otherwise counts towards doubling it."""
        torch._amp_update_scale_(self.value, self._good_steps, found_inf.float(), 2.0, 0.5, _GROW_EVERY)

    def to_json(self) -> dict[str, float]:
        """Returns the state; synchronises with the device."""
        return {"value": float(self.value), "good_steps": int(self._good_steps)}

    def load_json(self, state: dict[str, float]) -> None:
        """Restores a saved state."""
        self.value.fill_(state["value"])
        self._good_steps.fill_(int(state["good_steps"]))
