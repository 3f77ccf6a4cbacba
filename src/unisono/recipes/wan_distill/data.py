"""Data sets of what the teacher has drawn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from unisono.recipes.wan_distill.prompts import labels
from unisono.recipes.wan_distill.rollouts import Rows, Samples

Item = dict[str, Any]


class Kept(Dataset[Item]):
    """To learn from, the teacher's answers included: each sample comes once with each of its noise levels."""

    def __init__(self, samples: Samples, rows: Rows) -> None:
        self._samples, self._rows = samples, rows
        self._pairs, self._points = samples.drawing.pairs, len(samples.drawing.points)
        self._times = max(1, self._pairs, self._points)

    def __len__(self) -> int:
        return len(self._samples) * self._times

    def __getitem__(self, index: int) -> Item:
        number, place = divmod(index, self._times)
        samples = self._samples
        item = {"data": samples.data(number), "text": self._rows(samples.items[number][0])}
        if self._pairs:
            item |= samples.pair(number, place % self._pairs)
        if self._points:
            item |= samples.point(number, place % self._points)
        return item


class Numbers(Dataset[Item]):
    """To learn from while the teacher stays and draws anew: which sample it is, whatever it shows at that time."""

    def __init__(self, samples: Samples, rows: Rows) -> None:
        self._prompts, self._rows = [prompt for prompt, _ in samples.items], rows

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Item:
        return {"number": torch.tensor(index), "text": self._rows(self._prompts[index])}


class HeldOut(Dataset[Item]):
    """To evaluate with: a sample, the noise it came from, and the teacher's answers at all levels."""

    def __init__(self, samples: Samples, rows: Rows, *, judged: bool) -> None:
        """`judged`: the prompts are about the built-in shapes, and what is drawn can be told right or wrong."""
        self.samples, self._rows = samples, rows
        self._labels = labels([prompt for prompt, _ in samples.items]) if judged else [None] * len(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Item:
        samples = self.samples
        pairs = [samples.pair(index, place) for place in range(samples.drawing.pairs)]
        item = {name: torch.stack([pair[name] for pair in pairs]) for name in pairs[0]}
        item |= {"data": samples.data(index), "begin": samples.drawing.begin(*samples.items[index])}
        label = self._labels[index]
        item["label"] = torch.tensor(label if label is not None else (-1, -1))
        return {**item, "text": self._rows(samples.items[index][0])}


def stacked(samples: Samples, numbers: Tensor) -> Tensor:
    """[batch, C, f, h, w] samples by number, where the numbers are."""
    there: list[int] = numbers.tolist()
    return torch.stack([samples.data(number) for number in there]).to(numbers.device)
