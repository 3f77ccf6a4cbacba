"""Loaders of texts, and how texts are split, under the names people know.

A loader is for looking at batches, and for saying what to train on. Which texts make a batch while a model is trained
is the engine's to say, so that it is the same on any number of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, Subset

from unisono.data.order import Order
from unisono.errors import ConfigError
from unisono.recipes.seo.front.data import SEODataset, Together, texts_and_labels
from unisono.recipes.seo.front.splits import STRATEGIES, folds, parts

Loaders = tuple[DataLoader[Any], DataLoader[Any]]


@dataclass
class DataLoaderConfig:
    """How texts are loaded and split. Every field acts, or is refused with the reason."""

    batch_size: int = 32
    num_workers: int = 4
    pin_memory: bool = True
    persistent_workers: bool = True
    prefetch_factor: int = 2
    shuffle: bool = True
    drop_last: bool = False
    timeout: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    sampler: Any = None
    pin_memory_device: str = ""
    generator: Any = None
    multiprocessing_context: str | None = None
    use_cross_validation: bool = False
    cv_folds: int = 5
    cv_strategy: str = "stratified"
    """stratified (each class alike), kfold, timeseries (in order, what came before), group (whole groups)."""
    cv_repeats: int = 1
    train_ratio: float = 0.7
    val_ratio: float = 0.15
    test_ratio: float = 0.15
    stratify_by: str | None = None
    """A key of the metadata; the labels otherwise."""
    group_by: str | None = None
    """A key of the metadata: texts that share its value stay together."""
    time_series_split: bool = False
    preserve_order: bool = False
    """Split in the order that the texts have."""
    seo_domain_split: bool = False
    seo_keyword_split: bool = False
    seo_content_type_split: bool = False
    random_state: int = 42

    def __post_init__(self) -> None:
        refused = {
            "drop_last": "no text is left out of an epoch",
            "sampler": "the order of texts is the engine's, so that it is the same on any number of GPUs",
            "generator": "random_state and SEOConfig.seed say what is drawn",
            "timeout": "a loader that hangs is found and named by the engine",
            "pin_memory_device": "the device is the engine's",
            "multiprocessing_context": "the engine starts its own loader processes",
            "use_cross_validation": "call train_cross_validation",
            "time_series_split": "cv_strategy='timeseries' does it",
            "seo_domain_split": "cv_strategy='group' with group_by='domain' does it",
            "seo_keyword_split": "cv_strategy='group' with group_by='keyword' does it",
            "seo_content_type_split": "cv_strategy='group' with group_by='content_type' does it",
        }
        for name, reason in refused.items():
            if getattr(self, name) not in (None, False, 0, ""):
                raise ConfigError(f"{name}={getattr(self, name)!r} would do nothing: {reason}")
        for name, least in (("batch_size", 1), ("num_workers", 0), ("prefetch_factor", 1), ("cv_folds", 2)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise ConfigError(f"{name}: expected a whole number of at least {least}, got {getattr(self, name)!r}")
        if self.cv_strategy not in STRATEGIES:
            raise ConfigError(f"cv_strategy: expected {', '.join(STRATEGIES)}; got {self.cv_strategy!r}")
        if not isinstance(self.cv_repeats, int) or self.cv_repeats < 1:
            raise ConfigError(f"cv_repeats: expected a whole number of at least 1, got {self.cv_repeats!r}")


class OfRank(Sampler[int]):
    """The texts that fall to one of several processes: over all of them every text once, none twice."""

    def __init__(self, num: int, rank: int, world: int, *, shuffle: bool, seed: int) -> None:
        self.order, self.rank, self.world = Order(num, seed, shuffle), rank, world

    def __len__(self) -> int:
        return len(range(self.rank, self.order.num_samples, self.world))

    def __iter__(self) -> Iterator[int]:
        positions = np.arange(self.rank, self.order.num_samples, self.world)
        return iter(np.asarray(self.order.indices(positions)).tolist())


class DataLoaderManager:
    """Makes data sets, loaders of them, and splits."""

    def __init__(self, config: DataLoaderConfig | None = None, tokenizer: Any = None, max_length: int = 512) -> None:
        self.config, self.tokenizer, self.max_length = config or DataLoaderConfig(), tokenizer, max_length
        self.datasets: dict[str, Any] = {}

    def create_dataset(
        self,
        name: str,
        texts: Sequence[str],
        labels: Sequence[Any] | None = None,
        metadata: Mapping[str, Sequence[Any]] | None = None,
    ) -> SEODataset:
        """A data set, remembered by its name."""
        made = SEODataset(texts, labels, self.tokenizer, self.max_length, metadata)
        self.datasets[name] = made
        return made

    def create_dataloader(
        self, name: str, dataset: Any = None, *, shuffle: bool | None = None, sampler: Sampler[int] | None = None
    ) -> DataLoader[Any]:
        """A loader; without a data set, of the one of that name."""
        data = self.datasets.get(name) if dataset is None else dataset
        if data is None:
            raise ConfigError(f"there is no data set {name!r}; create_dataset makes one")
        config, workers = self.config, self.config.num_workers
        several = {"prefetch_factor": config.prefetch_factor, "persistent_workers": config.persistent_workers}
        mixed = config.shuffle if shuffle is None else shuffle
        return DataLoader(
            data,
            batch_size=config.batch_size,
            shuffle=mixed and sampler is None,
            sampler=sampler,
            collate_fn=config.collate_fn or Together(getattr(self.tokenizer, "pad_token_id", None) or 0),
            num_workers=workers,
            pin_memory=config.pin_memory and torch.cuda.is_available(),
            **(several if workers else {}),  # type: ignore[arg-type]
        )

    def create_train_val_split(self, name: str, dataset: Any, val_split: float = 0.2) -> Loaders:
        """Loaders of the texts to train on and of those to validate with; of each class alike."""
        train, val = self.split(dataset, [1 - val_split, val_split])
        return self.create_dataloader(name, train), self.create_dataloader(name, val, shuffle=False)

    def create_train_val_test_split(self, name: str, dataset: Any) -> tuple[DataLoader[Any], ...]:
        """Three loaders, by train_ratio, val_ratio and test_ratio."""
        config = self.config
        train, *others = self.split(dataset, [config.train_ratio, config.val_ratio, config.test_ratio])
        looked_at = [self.create_dataloader(name, each, shuffle=False) for each in others]
        return self.create_dataloader(name, train), *looked_at

    def create_cross_validation_folds(self, name: str, dataset: Any) -> list[Loaders]:
        """Loaders (train, validation) of each fold, cv_repeats times."""
        return [
            (self.create_dataloader(name, train), self.create_dataloader(name, val, shuffle=False))
            for train, val in self.folds(dataset)
        ]

    def split(self, dataset: Any, ratios: Sequence[float]) -> list[Subset[Any]]:
        """Parts of a data set."""
        seed, in_order = self.config.random_state, self.config.preserve_order
        texts = None if in_order else texts_and_labels(dataset)[0]
        found = parts(len(dataset), ratios, seed, self._classes(dataset), in_order=in_order, texts=texts)
        return [Subset(dataset, indices) for indices in found]

    def folds(self, dataset: Any) -> list[tuple[Subset[Any], Subset[Any]]]:
        """(train, validation) of each fold."""
        config, found = self.config, []
        groups = None if config.group_by is None else self._metadata(dataset, config.group_by, "group_by")
        for repeat in range(config.cv_repeats):
            seed = config.random_state + repeat
            classes, texts = self._classes(dataset), texts_and_labels(dataset)[0]
            found += folds(len(dataset), config.cv_folds, config.cv_strategy, seed, classes, groups, texts)
        return [(Subset(dataset, train), Subset(dataset, val)) for train, val in found]

    def _classes(self, dataset: Any) -> list[Any] | None:
        """What is spread evenly over parts: a key of the metadata, or labels where they are classes."""
        if self.config.stratify_by is not None:
            return self._metadata(dataset, self.config.stratify_by, "stratify_by")
        labels = texts_and_labels(dataset)[1]
        if labels is None or any(isinstance(label, float) and not label.is_integer() for label in labels):
            return None
        return [label if isinstance(label, str) else int(label) for label in labels]

    def _metadata(self, dataset: Any, key: str, field: str) -> list[Any]:
        known = getattr(dataset, "metadata", {})
        if key not in known:
            raise ConfigError(f"{field}: the data set has no metadata {key!r}; it has {', '.join(known) or 'none'}")
        return list(known[key])
