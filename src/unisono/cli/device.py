"""Resolves the option --device of commands that use a trained model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.errors import ConfigError

if TYPE_CHECKING:
    import torch


def usable_device(name: str) -> torch.device:
    """Returns the torch device with this name after a test allocation. `auto` is the first GPU, else the CPU."""
    import torch

    try:
        device = torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:200]
        raise ConfigError(f"--device {name} cannot be used here ({reason}); use cpu") from None
    return device
