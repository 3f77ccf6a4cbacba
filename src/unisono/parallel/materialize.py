"""Turns a model described on the meta device into one with weights.

Each module's initial weights are drawn with a seed of its own name, so that it does not matter in which order, on how
many ranks or how many modules at a time this happens.
"""

from __future__ import annotations

from zlib import crc32

import torch
from torch import nn

from unisono.data.bits import key_of
from unisono.errors import RecipeError

_WEIGHTS = 6  # keeps the weights' seeds apart from order, noise, items and dropout


def materialize(model: nn.Module, seed: int) -> None:
    """Gives modules on the meta device real, initialised weights on the CPU; others stay as they are."""
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        initialise = getattr(module, "reset_parameters", None)
        if initialise is None:
            raise RecipeError(
                f"model(): {name or type(model).__name__} is on meta but {type(module).__name__} has no "
                "reset_parameters() to initialise it; add one, or build the model on the CPU"
            )
        module.to_empty(device="cpu", recurse=False)
        torch.manual_seed(key_of(_WEIGHTS, seed, crc32(name.encode())) & 0x7FFFFFFFFFFFFFFF)
        initialise()
