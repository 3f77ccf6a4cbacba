"""Texts of several lengths in few batches of nearly equal ones.

A batch padded to its longest text computes mostly padding. Sorted by length and cut into a few groups, each padded to
its own longest, it computes little of it, and still is one batch: a coupled loss sees all of it at once. The number of
groups is fixed, because a sharded model gathers its weights for each of them on all ranks.
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
    """Texts by length: [texts, tokens] ids and masks of each group, and where each text has gone."""

    ids: list[Tensor]
    masks: list[Tensor]
    places: Tensor  # of the texts as they came, in the groups one after the other
    types: list[Tensor] | None = None  # of tokens, where a model wants to know which text they are of

    def on(self, device: torch.device) -> Groups:
        """The same on a device."""
        return to_device(self, device)  # type: ignore[no-any-return]

    def through(self, model: Callable[..., Tensor]) -> Tensor:
        """What the model gives for each text, in the order in which they came."""
        further = [()] * len(self.ids) if self.types is None else [(each,) for each in self.types]
        found = [model(ids, mask, *more) for ids, mask, more in zip(self.ids, self.masks, further, strict=True)]
        return torch.cat(found)[self.places]


def grouped(texts: Sequence[Tokens], pad_id: int, number: int, types: Sequence[Tokens] | None = None) -> Groups:
    """Texts in `number` groups."""
    lengths = np.array([len(text) for text in texts])
    order = np.argsort(lengths, kind="stable")
    parts = _cut(lengths[order], number)
    ids, masks, kinds = [], [], []
    places = np.zeros(len(texts), dtype=np.int64)
    done = 0
    for start, stop in parts:
        chosen = order[start:stop]
        # Fewer texts than groups: one of them is computed again, and not looked at.
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
    """Where to cut sorted lengths into so many parts that padding each to its longest costs least."""
    # Texts of one length stay together, so the work depends on how many lengths there are, not on how many texts.
    different, counts = np.unique(lengths, return_counts=True)
    ends, size, places = np.cumsum(counts), len(lengths), np.arange(len(different))
    if number >= len(different):
        return [*pairwise([0, *ends.tolist()]), *[(size, size)] * (number - len(different))]
    # cost[j]: the least area of all texts up to length j in the parts so far; a part has its texts times its longest.
    cost = ends * different
    cuts = []
    for _ in range(number - 1):
        area = (ends[:, None] - ends[None, :]) * different[:, None] + cost[None, :]
        area = np.where(places[None, :] < places[:, None], area, np.iinfo(np.int64).max)
        best = area.argmin(axis=1)
        cuts.append(best)
        cost = np.where(places > 0, area[places, best], cost)
    edges, last = [size], len(different) - 1
    for best in reversed(cuts):
        last = int(best[last])
        edges.append(int(ends[last]))
    return list(pairwise([0, *reversed(edges)]))
