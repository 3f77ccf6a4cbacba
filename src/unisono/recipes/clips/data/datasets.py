"""Data sets of clips: windows of videos to learn from, whole videos to evaluate with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from unisono.recipes.clips.data.extract import Extracted

Item = dict[str, Any]


class Windows(Dataset[Item]):
    """Parts of videos of at most `window` clips, each with its scores; longer videos overlap by half."""

    def __init__(
        self, videos: Sequence[Extracted], scores: Sequence[NDArray[np.float32]], kinds: Sequence[str], window: int
    ) -> None:
        self._videos, self._scores, self._kinds = videos, scores, kinds
        parts = [
            (number, start, stop)
            for number, video in enumerate(videos)
            for start, stop in windows_of(video.num_clips, window)
            if not np.isnan(scores[number][start:stop]).all()
        ]
        self._parts = np.array(parts, dtype=np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._parts)

    def shape(self, index: int) -> tuple[int]:
        """The number of clips: micro-batches are of one length."""
        _, start, stop = self._parts[index]
        return (int(stop - start),)

    def __getitem__(self, index: int) -> Item:
        number, start, stop = (int(part) for part in self._parts[index])
        video = self._videos[number]
        item: Item = {kind: torch.from_numpy(np.array(video.array(kind)[start:stop])) for kind in self._kinds}
        return item | {"scores": torch.from_numpy(self._scores[number][start:stop].copy())}


class Videos(Dataset[Item]):
    """Whole videos, each with its scores and statistics."""

    def __init__(
        self, videos: Sequence[Extracted], scores: Sequence[NDArray[np.float32]], kinds: Sequence[str]
    ) -> None:
        self._videos, self._scores, self._kinds = videos, scores, kinds

    def __len__(self) -> int:
        return len(self._videos)

    def shape(self, index: int) -> tuple[int]:
        """The number of clips."""
        return (self._videos[index].num_clips,)

    def __getitem__(self, index: int) -> Item:
        video = self._videos[index]
        arrays = dict.fromkeys([*self._kinds, *(["stats"] if "stats" in video.arrays else [])])
        item: Item = {kind: torch.from_numpy(np.array(video.array(kind))) for kind in arrays}
        return item | {"scores": torch.from_numpy(self._scores[index].copy()), "index": torch.tensor(index)}


def windows_of(clips: int, window: int) -> list[tuple[int, int]]:
    """Where windows of a video begin and end: all of the same length, if there are several."""
    if clips <= window:
        return [(0, clips)]
    step = max(1, window // 2)
    starts = [*range(0, clips - window, step), clips - window]
    return [(start, start + window) for start in starts]


def shuffled(scores: Sequence[NDArray[np.float32]], seed: int) -> list[NDArray[np.float32]]:
    """The same scores in another order within each video."""
    return [np.random.RandomState((seed, number)).permutation(values) for number, values in enumerate(scores)]
