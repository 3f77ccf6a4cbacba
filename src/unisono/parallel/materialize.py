"""Turns a model described on the meta device into one with weights.

Each module's initial weights are drawn with a seed of its own name, so that it does not matter in which order, on how
many ranks or how many modules at a time this happens.
"""

from __future__ import annotations

from collections import defaultdict
from zlib import crc32

from torch import nn

from unisono.data.bits import Purpose, key_of
from unisono.data.seeding import seed_everything
from unisono.errors import RecipeError


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
