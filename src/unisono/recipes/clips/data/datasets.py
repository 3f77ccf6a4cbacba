"""Datasets of clips: windows of videos for training, whole videos for evaluation."""

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
    """Windows of at most `window` consecutive clips with their scores; windows of a longer video overlap by half."""

    def __init__(
        self, videos: Sequence[Extracted], scores: Sequence[NDArray[np.float32]], kinds: Sequence[str], window: int
    ) -> None:
        self._videos, self._scores, self._kinds = videos, scores, kinds
        windows = [
            (number, start, stop)
            for number, video in enumerate(videos)
            for start, stop in windows_of(video.num_clips, window)
            if not np.isnan(scores[number][start:stop]).all()
        ]
        self._windows = np.array(windows, dtype=np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._windows)

    def shape(self, index: int) -> tuple[int]:
        """Returns the number of clips, because a micro-batch contains only windows of equal length."""
        _, start, stop = self._windows[index]
        return (int(stop - start),)

    def __getitem__(self, index: int) -> Item:
        number, start, stop = self._windows[index].tolist()
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
        """Returns the number of clips."""
        return (self._videos[index].num_clips,)

    def __getitem__(self, index: int) -> Item:
        video = self._videos[index]
        arrays = dict.fromkeys([*self._kinds, *(["stats"] if "stats" in video.arrays else [])])
        item: Item = {kind: torch.from_numpy(np.array(video.array(kind))) for kind in arrays}
        return item | {"scores": torch.from_numpy(self._scores[index].copy()), "index": torch.tensor(index)}


def windows_of(clips: int, window: int) -> list[tuple[int, int]]:
    """Returns first:last of each window of a video; all windows of one video have the same length."""
    if clips <= window:
        return [(0, clips)]
    step = max(1, window // 2)
    starts = [*range(0, clips - window, step), clips - window]
    return [(start, start + window) for start in starts]


def shuffled(scores: Sequence[NDArray[np.float32]], seed: int) -> list[NDArray[np.float32]]:
    """Shuffles the scores within each video."""
    return [np.random.RandomState((seed, number)).permutation(values) for number, values in enumerate(scores)]
