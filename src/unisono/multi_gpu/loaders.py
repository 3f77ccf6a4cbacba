"""A DataLoader of the user's, as far as it says what to train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

from unisono.errors import ConfigError


class Loaded:
    """What a DataLoader knows, or a plain data set."""

    def __init__(self, data: Any) -> None:
        self.data, self.batch_size, self.collate, self.shuffle, self.drop_last = data, None, None, None, False

    data: Dataset[Any] | None
    batch_size: int | None
    collate: Callable[[list[Any]], Any] | None
    shuffle: bool | None
    drop_last: bool

    @classmethod
    def of(cls, source: Any, name: str) -> Loaded:
        if not isinstance(source, DataLoader):
            return cls(source)
        found = cls(source.dataset)
        if source.batch_size is None:
            raise ConfigError(
                f"{name} has a batch_sampler of its own; which samples make a batch is decided here: "
                "give the data set and batch_size"
            )
        sampler = source.sampler
        plain = isinstance(sampler, SequentialSampler)
        if not plain and not (isinstance(sampler, RandomSampler) and not sampler.replacement):
            raise ConfigError(
                f"{name} has a {type(sampler).__name__}; the order of samples is decided here, so that it is the same "
                "on any number of GPUs: give the data set (for weights, repeat samples in it), or shuffle=True"
            )
        found.batch_size, found.collate, found.shuffle = source.batch_size, source.collate_fn, not plain
        found.drop_last = source.drop_last
        return found
