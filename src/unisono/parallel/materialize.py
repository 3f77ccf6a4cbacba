"""Turns a model described on the meta device into one with weights.

Each module's initial weights are drawn with a seed of its own name, so that it does not matter in which order, on how
many ranks or how many modules at a time this happens. Weights that come from elsewhere (a file) are asked for by name.
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
    """Where the weights of a model on the meta device come from."""

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """The rows start..stop-1 (of the first dimension) of the weight called `name`."""


def is_on_meta(model: nn.Module) -> bool:
    """Whether some weight of the model is still to be made."""
    return any(parameter.is_meta for parameter in model.parameters())


def fill(model: nn.Module, weights: Weights) -> None:
    """Gives a model on the meta device its weights, whole, on the CPU; buffers must be there.

    A weight that several modules share is asked for once, by its first name, and stays shared.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for place, module in model.named_modules():
        for short, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            if parameter not in made:
                name = f"{place}.{short}" if place else short
                whole = weights.rows(name, 0, len(parameter)).to(parameter.dtype)
                made[parameter] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            module.register_parameter(short, made[parameter])


@torch.no_grad()
def fill_shard(name: str, local: Tensor, rank: int, world: int, rows: int, weights: Weights) -> None:
    """Gives this rank's shard of a weight of `rows` rows its values; shards are cut as torch.chunk does."""
    each = -(-rows // world)
    start, stop = min(rank * each, rows), min((rank + 1) * each, rows)
    assert local.shape[0] == stop - start, f"{name}: a shard of {local.shape[0]} rows, expected {stop - start}"
    if stop > start:
        local.copy_(weights.rows(name, start, stop))


def materialize(model: nn.Module, seed: int) -> None:
    """Gives modules on the meta device real, initialised weights on the CPU; others stay as they are."""
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
    for places in tied:  # to_empty made a weight of its own for each place
        first, first_name = places[0]
        for module, name in places[1:]:
            setattr(module, name, getattr(first, first_name))


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of each meta weight that stands in several modules."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                places[id(parameter)].append((module, name))
    return [found for found in places.values() if len(found) > 1]
