"""What the labels of texts are: classes, or numbers. A score is learned from them, and from nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.errors import ConfigError

MOST_CLASSES = 20
"""Whole numbers of more different values than this are measurements, unless the config says otherwise."""


@dataclass(frozen=True)
class Labels:
    """How labels become what a model is trained on, and what it says becomes labels again."""

    classes: tuple[Any, ...] = ()
    """The classes in their order; empty where labels are numbers."""
    mean: float = 0.0
    """Of numbers: they are trained on less this,"""
    scale: float = 1.0
    """divided by this, so that any unit learns equally fast."""

    @classmethod
    def of(cls, labels: Sequence[Any] | None, wanted: str = "auto") -> Labels:
        """What these labels are; `wanted` is class, number or auto."""
        if labels is None or len(labels) == 0:
            raise ConfigError("labels: none were given; a score is learned from real labels, one for each text")
        plain = [_plain(label, place) for place, label in enumerate(labels)]
        words = any(isinstance(label, str) for label in plain)
        if words and wanted == "number":
            place = next(place for place, label in enumerate(plain) if isinstance(label, str))
            raise ConfigError(f"labels: number {place} is {plain[place]!r}, which is no number; use label='class'")
        few = words or _are_few(plain)
        if wanted == "class" or (wanted == "auto" and few):
            return cls(classes=_in_order(plain))
        values = np.array(plain, dtype=np.float64)
        if values.std() == 0:
            raise ConfigError(f"labels: all are {plain[0]!r}; nothing can be learned from one value")
        return cls(mean=float(values.mean()), scale=float(values.std()))

    @property
    def regression(self) -> bool:
        """Whether labels are numbers."""
        return not self.classes

    @property
    def num(self) -> int:
        """How many values a model gives for a text."""
        return len(self.classes) or 1

    def encode(self, labels: Sequence[Any]) -> list[int] | list[float]:
        """What is trained on."""
        plain = [_plain(label, place) for place, label in enumerate(labels)]
        if self.regression:
            return [(float(label) - self.mean) / self.scale for label in plain]
        numbers = {label: number for number, label in enumerate(self.classes)}
        for place, label in enumerate(plain):
            if label not in numbers:
                known = ", ".join(map(repr, self.classes[:8]))
                raise ConfigError(f"labels: number {place} is {label!r}, which is none of the classes {known}")
        return [numbers[label] for label in plain]

    def read(self, logits: np.ndarray) -> list[dict[str, Any]]:
        """What a model's values [N, num] say of each text: label, seo_score, and probabilities of classes.

        The score is a number itself, the probability of the second of two classes, or the mean of classes that are
        numbers; of three classes that are words there is none.
        """
        if self.regression:
            values = logits[:, 0] * self.scale + self.mean
            return [{"seo_score": float(value), "label": float(value), "probabilities": None} for value in values]
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        return [self._classified(row) for row in odds / odds.sum(axis=1, keepdims=True)]

    def _classified(self, odds: np.ndarray) -> dict[str, Any]:
        score: float | None = None
        if self.num == 2:
            score = float(odds[1])
        elif all(not isinstance(label, str) for label in self.classes):
            score = float(odds @ np.array(self.classes, dtype=np.float64))
        shares = {str(label): float(share) for label, share in zip(self.classes, odds, strict=True)}
        return {"seo_score": score, "label": self.classes[int(odds.argmax())], "probabilities": shares}

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return {"classes": list(self.classes), "mean": self.mean, "scale": self.scale}

    @classmethod
    def from_json(cls, found: Any) -> Labels:
        """From a file, which may say anything."""
        known: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
        classes, mean, scale = (known.get(name, -1) for name in ("classes", "mean", "scale"))
        numbers = all(isinstance(each, int | float) and math.isfinite(each) for each in (mean, scale))
        named = isinstance(classes, list) and all(isinstance(each, str | int | float) for each in classes)
        if not numbers or not named or scale <= 0 or len(classes) == 1:
            raise ConfigError("the labels of this checkpoint cannot be read: it is damaged, or not of this engine")
        return cls(tuple(classes), float(mean), float(scale))


def _plain(label: Any, place: int) -> str | int | float:
    """A label in a type of Python's; torch's and numpy's numbers are taken for what they are."""
    if hasattr(label, "item") and not isinstance(label, str):
        label = label.item()
    if isinstance(label, bool):
        return int(label)
    if isinstance(label, str) and label.strip():
        return label
    if isinstance(label, int | float) and math.isfinite(label):
        return label
    raise ConfigError(f"labels: number {place} is {label!r}; expected a class or a finite number")


def _are_few(numbers: Sequence[Any]) -> bool:
    """Whether they are rather classes: few different whole numbers, with several texts of each."""
    different = len(set(numbers))
    return different <= min(MOST_CLASSES, len(numbers) // 2) and all(float(each).is_integer() for each in numbers)


def _in_order(labels: Sequence[Any]) -> tuple[Any, ...]:
    """The classes, sorted: numbers by value, words by alphabet."""
    found = {int(label) if isinstance(label, float) and label.is_integer() else label for label in labels}
    if len(found) == 1:
        raise ConfigError(f"labels: all are {next(iter(found))!r}; nothing can be learned from one class")
    return tuple(sorted(found, key=lambda label: (isinstance(label, str), label)))
