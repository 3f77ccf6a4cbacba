"""Whole tensors out of a checkpoint, in one process: what an export starts from."""

from __future__ import annotations

from pathlib import Path

import torch

from unisono.checkpoint.find import validate
from unisono.checkpoint.load import describe, fill
from unisono.checkpoint.manifest import CheckpointError


def load_whole(path: Path, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names start with `prefix` ("model.", "ema."), whole, on the CPU, named without the prefix."""
    if (reason := validate(path, deep=False)) is not None:
        raise CheckpointError(f"{path} cannot be loaded: {reason}")
    names = {name: shape for name, shape in describe(path).items() if name.startswith(prefix)}
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in names.items()}
    fill(path, tensors)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
