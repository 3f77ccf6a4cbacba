"""Reads the initial weights of a pruned student row by row from the teacher's files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from unisono.recipes.wan.models.weights import Weights
from unisono.recipes.wan_distill.models.pruning import (
    EMBEDDER,
    MODULATIONS,
    SCALES,
    TABLE,
    PruningPlan,
    unit_key,
    units_of,
)
from unisono.recipes.wan_distill.models.random_weights import random_rows


class PrunedWeights:
    """The student's initial weights, taken from the teacher's files row by row."""

    def __init__(self, load: Callable[[], tuple[Weights, PruningPlan]]) -> None:
        """`load` returns the teacher's weights and the plan; a resumed run needs neither and never calls it."""
        self._load = cache(load)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Returns rows `start` to `stop` of a weight; reads only the range of the teacher's file that contains them."""
        weights, plan = self._load()
        inside = name.partition(".")[2]  # the name without the prefix of the student's only transformer
        if plan.random_attention and ".attn" in inside:
            return _random_attention(inside, start, stop, plan)
        layer, units = units_of(inside)
        if layer is not None:
            layer = plan.layers[layer]
            inside = f"blocks.{layer}.{inside.split('.', 2)[2]}"
        indices = [plan.kept.get(unit_key(layer, unit)) if unit else None for unit in units]
        if units[0] == "modulation" and (channels := plan.kept.get("channels")):
            width = weights.shape(inside)[0] // MODULATIONS
            indices[0] = [part * width + channel for part in range(MODULATIONS) for channel in channels]
        return _adjusted(inside, _selected(weights, inside, indices, start, stop), start, plan)


def _selected(weights: Weights, name: str, indices: Sequence[list[int] | None], start: int, stop: int) -> Tensor:
    first, *others = indices
    row_indices = range(start, stop) if first is None else first[start:stop]
    begin, end = row_indices[0], row_indices[-1] + 1
    rows = weights.rows(name, begin, end)
    if end - begin > len(row_indices):
        rows = rows[torch.tensor(row_indices) - begin]
    for dimension, kept in enumerate(others, 1):
        if kept is not None:
            rows = rows.index_select(dimension, torch.tensor(kept))
    return rows


def _adjusted(name: str, rows: Tensor, start: int, plan: PruningPlan) -> Tensor:
    """Applies the gains to a norm's weight, or to the scale that follows the norm (stored as scale - 1)."""
    gain, factor = plan.gain, plan.gains.get(name, 1.0) * plan.factor
    if gain != 1.0 and name.endswith(".norm2.weight"):
        factor *= gain
    elif gain != 1.0 and name.endswith(TABLE):
        # The time embedding is also added to the last norm's scale and shift; that part cannot be compensated.
        scales = list(SCALES if name.startswith("blocks.") else SCALES[:1])
        rows = rows.float()
        rows[:, scales] = (1 + rows[:, scales]) * gain - 1
    elif gain != 1.0 and name.startswith(f"{EMBEDDER}.time_proj."):
        part = torch.arange(start, start + len(rows)) // len(plan.kept["channels"])
        rows = rows.float()
        rows[torch.isin(part, torch.tensor(SCALES))] *= gain
    return rows if factor == 1.0 else rows.float() * factor


def _random_attention(name: str, start: int, stop: int, plan: PruningPlan) -> Tensor:
    # The output layer of attention starts with zeros, so that random attention does not disturb the pruned layers.
    shape = (plan.random_attention,) * (2 if ".to_" in name and name.endswith(".weight") else 1)
    if ".to_out." in name:
        return torch.zeros(stop - start, *shape[1:])
    return random_rows(name, shape, start, stop, plan.seed)
