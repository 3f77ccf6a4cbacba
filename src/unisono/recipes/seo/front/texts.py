"""A dataset of labelled texts, its loaders and splits.

A loader tells the engine which texts to train on, and lets users look at batches. During training, the engine forms the
batches itself, so that they are the same on any number of GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from unisono.data.order import Order
from unisono.errors import ConfigError
from unisono.recipes.seo.data.tokens import whole_text

Loader = DataLoader[dict[str, Any]]
Split = tuple[list[int], list[int]]
"""Indices of the training texts and of the validation texts."""


class LabelledTexts(Dataset[dict[str, Any]]):
    """Texts with one label each; an item also contains the text's tokens."""

    def __init__(self, texts: Sequence[str], labels: Sequence[Any], tokenizer: Any, max_length: int) -> None:
        check_texts(texts, labels)
        self.texts, self.labels = list(texts), list(labels)
        self.tokenizer, self.max_length = tokenizer, max_length

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        text = self.texts[index]
        tokens = self.tokenizer(whole_text(text), truncation=True, max_length=self.max_length)["input_ids"]
        return {"text": text, "labels": self.labels[index], "input_ids": torch.tensor(tokens, dtype=torch.int64)}

    def collate(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Pads the token ids to the longest text of a batch."""
        rows = [item["input_ids"] for item in items]
        labels = [item["labels"] for item in items]
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            "text": [item["text"] for item in items],
            "labels": labels if isinstance(labels[0], str) else torch.as_tensor(labels),
            "input_ids": pad(rows, batch_first=True, padding_value=self.tokenizer.pad_token_id),
            "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True),
        }


def check_texts(texts: Sequence[str], labels: Sequence[Any] | None) -> None:
    """Rejects empty texts, and labels that do not match the texts."""
    if not len(texts):
        raise ConfigError("texts is empty")
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            problem = "is empty" if isinstance(text, str) else f"is of type {type(text).__name__}"
            raise ConfigError(f"texts: number {index} {problem}; remove it and its label")
    if labels is None or len(labels) != len(texts):
        raise ConfigError(f"labels: got {len(labels or ())} for {len(texts)} texts; pass one label per text")


class RankSampler(Sampler[int]):
    """Samples the texts of one process, so that all processes together read every text once."""

    def __init__(self, num_texts: int, rank: int, world: int, *, shuffle: bool, seed: int) -> None:
        self.order, self.rank, self.world = Order(num_texts, seed, shuffle), rank, world

    def __len__(self) -> int:
        return len(range(self.rank, self.order.num_samples, self.world))

    def __iter__(self) -> Iterator[int]:
        positions = np.arange(self.rank, self.order.num_samples, self.world)
        return iter(np.asarray(self.order.indices(positions)).tolist())


def texts_and_labels(loader: Any, name: str) -> tuple[list[str], list[Any]]:
    """Returns all texts and labels of a loader, not only those of this process."""
    subset = loader.dataset if isinstance(loader, DataLoader) else None
    if not isinstance(subset, Subset) or not isinstance(subset.dataset, LabelledTexts):
        raise ConfigError(
            f"{name}: expected a loader from create_training_dataloaders or create_distributed_dataloaders, got "
            f"{type(loader).__name__}"
        )
    data = subset.dataset
    return [data.texts[index] for index in subset.indices], [data.labels[index] for index in subset.indices]


def split_texts(texts: Sequence[str], labels: Sequence[Any], val_split: float, seed: int) -> Split:
    """Returns training and validation splits with equal fractions of each class; equal texts are in the same split."""
    from sklearn.model_selection import train_test_split

    copies = _copies(texts)
    if not 0 < val_split < 1 or len(copies) < 2:
        raise ConfigError(f"val_split {val_split}: expected a number between 0 and 1, and at least 2 distinct texts")
    num_val = min(max(1, round(val_split * len(copies))), len(copies) - 1)
    classes = _classes(copies, labels)
    enough = classes is not None and min(num_val, len(copies) - num_val) >= len(set(classes))
    train, val = train_test_split(copies, test_size=num_val, random_state=seed, stratify=classes if enough else None)
    return sorted(chain.from_iterable(train)), sorted(chain.from_iterable(val))


def fold_texts(texts: Sequence[str], labels: Sequence[Any], num_folds: int, seed: int) -> list[Split]:
    """Returns cross-validation folds with the same fraction of each class; equal texts are in the same fold."""
    from sklearn.model_selection import KFold, StratifiedKFold

    copies = _copies(texts)
    if not isinstance(num_folds, int) or not 2 <= num_folds <= len(copies):
        raise ConfigError(f"num_folds {num_folds}: expected 2 to {len(copies)}, the number of distinct texts")
    classes = _classes(copies, labels, at_least=num_folds)
    if classes is None:
        folds = KFold(num_folds, shuffle=True, random_state=seed).split(copies)
    else:
        folds = StratifiedKFold(num_folds, shuffle=True, random_state=seed).split(copies, classes)

    def indices(chosen: np.ndarray) -> list[int]:
        return sorted(index for group in chosen for index in copies[group])

    return [(indices(train), indices(val)) for train, val in folds]


def _copies(texts: Sequence[str]) -> list[list[int]]:
    """Returns the indices of each distinct text."""
    indices: dict[str, list[int]] = {}
    for index, text in enumerate(texts):
        indices.setdefault(text, []).append(index)
    return list(indices.values())


def _classes(copies: list[list[int]], labels: Sequence[Any], at_least: int = 2) -> list[str] | None:
    """Returns the class of each distinct text; None if labels are numbers, or a class has too few texts to split."""
    classes = [str(labels[group[0]]) for group in copies]
    return classes if min(Counter(classes).values()) >= at_least else None
