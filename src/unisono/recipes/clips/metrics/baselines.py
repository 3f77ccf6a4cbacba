"""Untrained baselines, which a trained model has to beat before its metrics mean anything."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Kind = Literal["random", "centre", "earliest", "frame_difference", "loudness"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def kinds_for(names: Sequence[str]) -> tuple[Kind, ...]:
    """Returns the baselines that can be computed from these statistics; feature files have no statistics."""
    return tuple(kind for kind in KINDS if kind in names or kind in ("random", "centre", "earliest"))


def scores(kind: Kind, stats: NDArray[np.floating], names: Sequence[str], *, video: str = "") -> NDArray[np.float64]:
    """Returns a score [T] from 0 to 1 for each clip, from the statistics [T, D] with columns `names`.

    random: seeded by the video's name, so equal in all runs and on all ranks. centre, earliest: depend only on the
    position. frame_difference, loudness: the column of this name, scaled to 0..1; all 0 if it is constant (no sound).
    """
    length = len(stats)
    if kind == "random":
        seed = int.from_bytes(hashlib.sha256(video.encode("utf-8", "surrogateescape")).digest()[:8], "big")
        return np.random.default_rng(seed).random(length)
    position = (np.arange(length) + 0.5) / max(1, length)
    if kind == "centre":
        return 1 - 2 * np.abs(position - 0.5)
    if kind == "earliest":
        return 1 - position
    column = np.asarray(stats[:, list(names).index(kind)], np.float64)
    column = np.nan_to_num(column, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = (float(column.min()), float(column.max())) if length else (0.0, 0.0)
    return (column - low) / (high - low) if high > low else np.zeros(length)
