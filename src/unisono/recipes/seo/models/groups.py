"""Divides a batch into groups of texts of similar length, to reduce padding.

Each group is padded to its longest text, and the results are joined into one batch in the original order. The number of
groups is fixed, because a sharded model gathers its weights once per group, on all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.data.loader import to_device
from unisono.recipes.seo.models.encoder import pad

Tokens = NDArray[np.integer[Any]]


class Groups(NamedTuple):
    """Ids and masks of each group, [texts, tokens] each, and the position of each text."""

    ids: list[Tensor]
    masks: list[Tensor]
    places: Tensor  # position of each original text in the concatenated groups
    types: list[Tensor] | None = None  # token types of pairs, if the model uses them

    def on(self, device: torch.device) -> Groups:
        """Returns a copy on a device."""
        return to_device(self, device)  # type: ignore[no-any-return]

    def through(self, model: Callable[..., Tensor]) -> Tensor:
        """Applies a model and returns the results in the original order of the texts."""
        further = [()] * len(self.ids) if self.types is None else [(each,) for each in self.types]
        results = [model(ids, mask, *more) for ids, mask, more in zip(self.ids, self.masks, further, strict=True)]
        return torch.cat(results)[self.places]


def grouped(texts: Sequence[Tokens], pad_id: int, number: int, types: Sequence[Tokens] | None = None) -> Groups:
    """Divides texts into `number` groups of similar length and pads each group."""
    lengths = np.array([len(text) for text in texts])
    order = np.argsort(lengths, kind="stable")
    parts = _cut(lengths[order], number)
    ids, masks, kinds = [], [], []
    places = np.zeros(len(texts), dtype=np.int64)
    done = 0
    for start, stop in parts:
        chosen = order[start:stop]
        # If there are fewer texts than groups, the empty groups compute one of the texts again and ignore the result.
        rows = [texts[each] for each in chosen] or [texts[order[0]]]
        padded, mask = pad(rows, pad_id)
        ids.append(padded)
        masks.append(mask)
        if types is not None:
            kinds.append(pad([types[each] for each in chosen] or [types[order[0]]], 0)[0])
        places[chosen] = done + np.arange(len(chosen))
        done += len(rows)
    return Groups(ids, masks, torch.from_numpy(places), kinds if types is not None else None)


def _cut(lengths: NDArray[np.int64], number: int) -> list[tuple[int, int]]:
    """Divides sorted lengths into `number` parts with the least padding; returns the start and end of each part."""
    # Texts of equal length stay together, so the cost depends on the number of distinct lengths.
    distinct, counts = np.unique(lengths, return_counts=True)
    ends, size, places = np.cumsum(counts), len(lengths), np.arange(len(distinct))
    if number >= len(distinct):
        return [*pairwise([0, *ends.tolist()]), *[(size, size)] * (number - len(distinct))]
    # cost[j]: the smallest padded size of all texts up to the j-th distinct length, with the number of parts so far.
    cost = ends * distinct
    cuts = []
    for _ in range(number - 1):
        area = (ends[:, None] - ends[None, :]) * distinct[:, None] + cost[None, :]
        area = np.where(places[None, :] < places[:, None], area, np.iinfo(np.int64).max)
        best = area.argmin(axis=1)
        cuts.append(best)
        cost = np.where(places > 0, area[places, best], cost)
    edges, last = [size], len(distinct) - 1
    for best in reversed(cuts):
        last = int(best[last])
        edges.append(int(ends[last]))
    return list(pairwise([0, *reversed(edges)]))
