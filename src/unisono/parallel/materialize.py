"""Gives a model on the meta device its weights.

Each module is initialised with a seed that depends on its name, so the order of modules and the number of ranks do not
matter. Weights from files are requested by name.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor, nn

from unisono.data.bits import Purpose, key_of
from unisono.data.seeding import seed_everything
from unisono.errors import RecipeError


class Weights(Protocol):
    """The source of the weights of a model on the meta device."""

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """The rows start..stop-1 (of the first dimension) of the weight called `name`."""


def is_on_meta(model: nn.Module) -> bool:
    """Whether any weight of the model is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def fill(model: nn.Module, weights: Weights) -> None:
    """Gives a model on the meta device whole weights on the CPU; its buffers must be real.

    A weight that several modules share is requested once, by its first name, and remains shared.
    """
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for short, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            if parameter not in filled:
                name = f"{prefix}.{short}" if prefix else short
                whole = weights.rows(name, 0, len(parameter)).to(parameter.dtype)
                filled[parameter] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            module.register_parameter(short, filled[parameter])


@torch.no_grad()
def fill_shard(name: str, local: Tensor, rank: int, world: int, rows: int, weights: Weights) -> None:
    """Fills this rank's shard of a weight with `rows` rows, split like torch.chunk."""
    each = -(-rows // world)
    start, stop = min(rank * each, rows), min((rank + 1) * each, rows)
    assert local.shape[0] == stop - start, f"{name}: a shard of {local.shape[0]} rows, expected {stop - start}"
    if stop > start:
        local.copy_(weights.rows(name, start, stop))


def materialize(model: nn.Module, seed: int) -> None:
    """Initialises modules that are on the meta device with real weights on the CPU; others do not change."""
    tied = _tied(model)
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
        seed_everything(key_of(Purpose.WEIGHTS, seed, crc32(name.encode())))
        initialise()
    for slots in tied:  # to_empty has created a separate weight for each module
        first, first_name = slots[0]
        for module, name in slots[1:]:
            setattr(module, name, getattr(first, first_name))


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The (module, name) pairs of each meta weight that several modules share."""
    slots: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                slots[id(parameter)].append((module, name))
    return [shared for shared in slots.values() if len(shared) > 1]
