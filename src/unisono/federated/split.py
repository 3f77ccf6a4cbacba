"""Divides a dataset among clients. The result depends only on the data, the seed and the number of clients."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from unisono.data.order import Order
from unisono.errors import ConfigError, RecipeError

FORMS = "iid, none or by:FIELD"


def check_split(split: str) -> None:
    """Raises ConfigError for an unknown form of --split."""
    if split not in ("iid", "none") and not re.fullmatch(r"by:.+", split):
        raise ConfigError(f"split: expected {FORMS}, got {split!r}")


def indices_of(dataset: Dataset[Any], split: str, client: int, clients: int, seed: int) -> Sequence[int]:
    """Returns the indices of a client's samples, in ascending order. Every sample belongs to exactly one client.

    iid: a pseudo-random permutation of the samples is dealt out to the clients in turn, so their sample counts
    differ by at most one. by:FIELD: samples with the same value of a field belong to the same client, and the sorted
    values are dealt out in turn. FIELD is a key of a sample, or the index of an element if samples are tuples. none:
    every client has all samples (for clients that read different files).
    """
    num_samples: int = len(dataset)  # type: ignore[arg-type]
    if split == "none" or clients == 1:
        return range(num_samples)
    if split == "iid":
        order = Order(num_samples, seed)
        return sorted(order[position] for position in range(client, num_samples, clients))
    name = split.removeprefix("by:")
    values = [_value(dataset[index], name) for index in range(num_samples)]
    owner = {value: place % clients for place, value in enumerate(sorted(set(values)))}
    if len(owner) < clients:
        raise ConfigError(f"split {split}: {len(owner)} values for {clients} clients; use at most {len(owner)} clients")
    return [index for index, value in enumerate(values) if owner[value] == client]


def _value(sample: Any, name: str) -> str:
    try:
        value = sample[name] if isinstance(sample, Mapping) else sample[int(name)]
    except (KeyError, IndexError, ValueError, TypeError):
        fields = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else "0, 1, … (samples are tuples)"
        raise ConfigError(f"split by:{name}: samples have no such field; they have {fields}") from None
    value = value.item() if hasattr(value, "item") else value
    return f"{value:020.6f}" if isinstance(value, int | float) else str(value)


class Share(Dataset[Any]):
    """The samples of one client."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        if not indices:
            raise RecipeError("a client has no samples; use fewer clients, or another --split")
        self._dataset, self._indices = dataset, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._indices[index]]


class ShareOfShapes(Share):
    """The samples of one client, for a dataset that defines shape()."""

    def shape(self, index: int) -> Any:
        """Returns the shape of a sample; the engine puts samples of equal shape into a batch."""
        return self._dataset.shape(self._indices[index])


class ShareWithCosts(ShareOfShapes):
    """The samples of one client, for a dataset that defines shape() and cost()."""

    def cost(self, index: int) -> Any:
        """Returns the relative cost of a sample."""
        return self._dataset.cost(self._indices[index])


def share_of(dataset: Any, indices: Sequence[int]) -> Share:
    """Returns the samples with these indices as a dataset."""
    if not hasattr(dataset, "shape"):
        return Share(dataset, indices)
    return (ShareWithCosts if hasattr(dataset, "cost") else ShareOfShapes)(dataset, indices)
