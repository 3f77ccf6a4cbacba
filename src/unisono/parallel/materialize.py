"""Gives a model on the meta device its weights.

Each module is initialised with a seed that depends on its name, so the order of modules and the number of ranks do not
matter. Weights from files are requested by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor, nn

from unisono.data.bits import Purpose, key_of
from unisono.data.seeding import seed_everything
from unisono.errors import RecipeError
from unisono.parallel.from_rank_zero import FromRankZero, NotMovable, exchange, rows_at_once


class Weights(Protocol):
    """The source of the weights of a model on the meta device."""

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Returns the rows start..stop-1 (of the first dimension) of the weight called `name`."""


def is_on_meta(model: nn.Module) -> bool:
    """Whether any weight of the model is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def fill(
    model: nn.Module,
    weights: Weights,
    device: torch.device | str = "cpu",
    *,
    on_host: Collection[nn.Parameter] = frozenset(),
) -> None:
    """Fills a model on the meta device with whole weights, each moved to `device` as it is read. Buffers must be real.

    The weights in `on_host` stay in host memory. Of all others, host memory holds one piece at a time. A weight that
    several modules share is requested once, by its first name, and remains shared.
    """
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            whole = torch.empty_like(parameter, device="cpu" if parameter in on_host else device)
            read_into(whole, name, weights)
            _replace(model, name, parameter, whole)


def _replace(model: nn.Module, name: str, parameter: nn.Parameter, whole: Tensor) -> None:
    try:
        exchange(name, parameter, whole)
    except NotMovable:  # replace the parameter in the modules instead; other references keep the old one
        filled = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        for module in model.modules():
            for short, own in list(module.named_parameters(recurse=False)):
                if own is parameter:
                    module.register_parameter(short, filled)


def fill_shard(name: str, local: Tensor, rank: int, world: int, rows: int, weights: Weights) -> None:
    """Fills this rank's shard of a weight with `rows` rows, split like torch.chunk."""
    each = -(-rows // world)
    start, stop = min(rank * each, rows), min((rank + 1) * each, rows)
    assert local.shape[0] == stop - start, f"{name}: a shard of {local.shape[0]} rows, expected {stop - start}"
    read_into(local, name, weights, start)


@torch.no_grad()
def read_into(target: Tensor, name: str, weights: Weights, first_row: int = 0) -> None:
    """Reads the rows of the weight `name` from `first_row` on into `target`, piece by piece.

    This is the only place where weights that have been read are converted and placed.
    """
    target = target if target.dim() else target.view(1)
    for row, rows in _pieces(weights, name, first_row, target):
        start = row - first_row
        # Move to the device before casting: files often have a lower precision than the model, and GPUs cast faster.
        target[start : start + len(rows)].copy_(rows.to(target.device))
        del rows  # frees the piece before memory for the next one is allocated


def _pieces(weights: Weights, name: str, first_row: int, target: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields the requested rows of a weight as (first row, rows) pairs of limited size."""
    last_row = first_row + len(target)
    if isinstance(weights, FromRankZero):
        if name in weights:
            yield from weights.pieces(name, first_row, last_row)
            return
        assert weights.files is not None, f"{name} is on the meta device, and weights() returned None"
        weights = weights.files
    at_once = rows_at_once(target.shape, target.dtype)
    for start in range(first_row, last_row, at_once):
        yield start, weights.rows(name, start, min(start + at_once, last_row))


def materialize(model: nn.Module, seed: int) -> None:
    """Initialises modules that are on the meta device with real weights on the CPU; other modules do not change."""
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
    """Returns the (module, name) pairs of each meta weight that several modules share."""
    slots: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                slots[id(parameter)].append((module, name))
    return [shared for shared in slots.values() if len(shared) > 1]
