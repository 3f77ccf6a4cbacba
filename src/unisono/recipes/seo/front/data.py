"""Texts with their labels as a data set, and as batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from unisono.errors import ConfigError
from unisono.recipes.seo.data.tokens import whole_text


class SEODataset(Dataset[dict[str, Any]]):
    """Texts with their labels, and with anything else that is known of each."""

    def __init__(
        self,
        texts: Sequence[str],
        labels: Sequence[Any] | None = None,
        tokenizer: Any = None,
        max_length: int = 512,
        metadata: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Without labels there are none: nothing is invented. With a tokenizer, items have input_ids, too."""
        self.texts, self.labels = list(texts), None if labels is None else list(labels)
        self.tokenizer, self.max_length, self.metadata = tokenizer, max_length, dict(metadata or {})
        for place, text in enumerate(self.texts):
            if not isinstance(text, str) or not text.strip():
                said = "is empty" if isinstance(text, str) else f"is of type {type(text).__name__}"
                raise ConfigError(f"texts: number {place} {said}; leave it and its label out")
        for name, values in {"labels": self.labels, **self.metadata}.items():
            if values is not None and len(values) != len(self.texts):
                raise ConfigError(f"{name}: {len(values)} of them for {len(self.texts)} texts; give one for each")

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item: dict[str, Any] = {"text": self.texts[index]}
        if self.labels is not None:
            item["labels"] = _as_tensor(self.labels[index])
        item.update({name: values[index] for name, values in self.metadata.items()})
        if self.tokenizer is not None:
            tokens = self.tokenizer(whole_text(self.texts[index]), truncation=True, max_length=self.max_length)
            item["input_ids"] = torch.tensor(tokens["input_ids"], dtype=torch.int64)
            item["attention_mask"] = torch.ones_like(item["input_ids"])
        return item


def _as_tensor(label: Any) -> Any:
    if isinstance(label, str):
        return label
    value = torch.as_tensor(label)
    return value.float() if value.is_floating_point() else value.long()


def texts_and_labels(data: Any, name: str = "the data") -> tuple[list[str], list[Any] | None]:
    """The texts and labels of a data set, of a part of one, or of a loader."""
    if isinstance(data, DataLoader):
        return texts_and_labels(data.dataset, name)
    if isinstance(data, SEODataset):
        return data.texts, data.labels
    if isinstance(data, Subset):
        texts, labels = texts_and_labels(data.dataset, name)
        kept = [int(index) for index in data.indices]
        return [texts[index] for index in kept], None if labels is None else [labels[index] for index in kept]
    if isinstance(data, ConcatDataset):
        both = [texts_and_labels(each, name) for each in data.datasets]
        alike = all(labels is not None for _, labels in both)
        texts = [text for some, _ in both for text in some]
        return texts, [label for _, some in both for label in some or ()] if alike else None
    if isinstance(data, Sized) and hasattr(data, "__getitem__"):
        return _of_items([data[index] for index in range(len(data))], name)
    raise ConfigError(f"{name}: expected a SEODataset or a loader of one, got {type(data).__name__}")


def _of_items(items: list[Any], name: str) -> tuple[list[str], list[Any] | None]:
    """Of a data set of the user's own: items are (text, label), or dicts with `text` and `labels`."""
    pairs = [
        (item.get("text"), item.get("labels", item.get("label"))) if isinstance(item, Mapping) else item
        for item in items
    ]
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ConfigError(f"{name}: items must be (text, label), or dicts with `text` and `labels`; or use SEODataset")
    labels = [label for _, label in pairs]
    return [str(text) for text, _ in pairs], None if any(label is None for label in labels) else labels


class Together:
    """Puts items into a batch: token ids padded to the longest, labels as a tensor, everything else as lists."""

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = {name: [item[name] for item in items] for name in items[0]}
        for name, values in batch.items():
            if name in ("input_ids", "attention_mask"):
                fill = self.pad_id if name == "input_ids" else 0
                batch[name] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)
            elif isinstance(values[0], Tensor):
                batch[name] = torch.stack(values)
        return batch
