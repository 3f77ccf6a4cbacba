"""--device of commands that use a trained model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.errors import ConfigError

if TYPE_CHECKING:
    import torch


def usable_device(asked: str) -> torch.device:
    """The device of that name, tried out; `auto` is the GPU, where there is one."""
    import torch

    name = asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        told = str(error).splitlines()[0][:200]
        raise ConfigError(f"--device {asked} cannot be used here ({told}); use cpu") from None
    return device
