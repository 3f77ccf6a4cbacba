"""Reads the settings of a user's DataLoader: dataset, batch size, order and collate function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

from unisono.errors import ConfigError


@dataclass(frozen=True)
class DataSource:
    """A dataset, with the options of the user's DataLoader if the user passed one."""

    data: Dataset[Any] | None
    batch_size: int | None = None
    collate: Callable[[list[Any]], Any] | None = None
    shuffle: bool | None = None
    drop_last: bool = False

    @classmethod
    def of(cls, source: Any, name: str) -> DataSource:
        """Reads a dataset or a DataLoader, passed as the argument `name`; raises ConfigError for custom samplers."""
        if not isinstance(source, DataLoader):
            return cls(source)
        if source.batch_size is None:
            raise ConfigError(
                f"{name} has a batch_sampler, but the trainer decides which samples make a batch; pass the dataset and "
                "batch_size"
            )
        sampler = source.sampler
        is_sequential = isinstance(sampler, SequentialSampler)
        if not is_sequential and not (isinstance(sampler, RandomSampler) and not sampler.replacement):
            raise ConfigError(
                f"{name} has a {type(sampler).__name__}, but the trainer decides the order of samples, so that it is "
                "the same on any number of GPUs; pass the dataset (repeat samples to weight them), or shuffle=True"
            )
        return cls(source.dataset, source.batch_size, source.collate_fn, not is_sequential, source.drop_last)
