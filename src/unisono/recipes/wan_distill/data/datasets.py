"""Datasets for training and evaluating a student, from prompts and the teacher's samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from unisono.recipes.wan_distill.data.prompts import labels
from unisono.recipes.wan_distill.data.rollouts import Embed, Samples

Item = dict[str, Any]


class RolloutDataset(Dataset[Item]):
    """Training items with the teacher's stored velocities: one item per sample and stored noise level."""

    def __init__(self, samples: Samples, embed: Embed) -> None:
        self._samples, self._embed = samples, embed
        self._pairs, self._points = samples.spec.pairs, len(samples.spec.points)
        self._repeats = max(1, self._pairs, self._points)

    def __len__(self) -> int:
        return len(self._samples) * self._repeats

    def __getitem__(self, index: int) -> Item:
        number, repeat = divmod(index, self._repeats)
        samples = self._samples
        item = {"data": samples.data(number), "text": self._embed(samples.items[number][0])}
        if self._pairs:
            item |= samples.pair(number, repeat % self._pairs)
        if self._points:
            item |= samples.point(number, repeat % self._points)
        return item


class OnlineDataset(Dataset[Item]):
    """Training items for an online teacher: only the sample's number, because every refresh replaces the samples."""

    def __init__(self, samples: Samples, embed: Embed) -> None:
        self._prompts, self._embed = [prompt for prompt, _ in samples.items], embed

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Item:
        return {"number": torch.tensor(index), "text": self._embed(self._prompts[index])}


class PromptDataset(Dataset[Item]):
    """Training items for a student that generates its own samples: the embeddings of the prompts."""

    def __init__(self, prompts: Sequence[str], embed: Embed) -> None:
        self._prompts, self._embed = prompts, embed

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Item:
        return {"text": self._embed(self._prompts[index])}


class EvalDataset(Dataset[Item]):
    """Held-out samples, each with its starting noise and the teacher's velocities at the noise levels of the spec."""

    def __init__(self, samples: Samples, embed: Embed, *, has_labels: bool) -> None:
        """`has_labels`: whether the prompts describe built-in shapes, so generated samples can be classified."""
        self.samples, self._embed = samples, embed
        self._labels = labels([prompt for prompt, _ in samples.items]) if has_labels else [None] * len(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Item:
        samples = self.samples
        pairs = [samples.pair(index, level) for level in range(samples.spec.pairs)]
        item = {name: torch.stack([pair[name] for pair in pairs]) for name in (pairs[0] if pairs else ())}
        item |= {"data": samples.data(index), "initial_noise": samples.spec.initial_noise(*samples.items[index])}
        label = self._labels[index]
        item["label"] = torch.tensor(label if label is not None else (-1, -1))
        return {**item, "text": self._embed(samples.items[index][0])}


def stacked(samples: Samples, numbers: Tensor) -> Tensor:
    """Stacks the samples with these numbers, [batch, C, f, h, w], on the device of `numbers`."""
    on_host: list[int] = numbers.tolist()
    return torch.stack([samples.data(number) for number in on_host]).to(numbers.device)
