"""Chooses the best moments of a video by its scores; moments do not overlap, and their length is limited."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unisono.errors import ConfigError

_JOIN_FROM = 0.5  # a neighbouring clip joins a moment if it scores at least halfway from the typical clip to the moment
_FLAT = 1e-6  # smaller score differences are rounding errors and do not decide between two clips
_TINY = 1e-6  # tolerance in seconds for rounding errors


@dataclass(frozen=True)
class Moment:
    """A part of a video, in seconds after its first frame, and its mean score."""

    start: float
    end: float
    score: float

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.end - self.start


def pick(
    scores: ArrayLike,
    clip_seconds: float,
    *,
    number: int = 5,
    shortest: float = 4.0,
    longest: float = 60.0,
    gap: float = 2.0,
    duration: float | None = None,
) -> list[Moment]:
    """Returns the `number` best moments of a video, best first; in a tie, the earlier moment first.

    With a smaller `number`, the result is a prefix of the same list.

    A moment starts as the best-scoring stretch of the shortest length. It then grows by its better neighbouring clip as
    long as that clip stands out from the video too. Moments are at least `gap` seconds apart and contain no clip
    without a score (NaN). A video shorter than the shortest moment is one moment. If nothing stands out, moments have
    the shortest length and are taken from the beginning of the video. `duration` is the length of the video, which may
    end within its last clip.
    """
    _check(clip_seconds, number, shortest, longest, gap)
    values = np.asarray(scores, np.float64)
    times: NDArray[np.float64] = np.arange(len(values) + 1, dtype=np.float64) * clip_seconds
    if duration is not None and len(values):
        times = np.minimum(times, max(duration, float(times[-2]) + _TINY))
    free = np.isfinite(values)
    if not free.any():
        return []
    typical = min(float(np.median(values[free])), float(np.mean(values[free])))
    moments: list[Moment] = []
    # Finds all moments first and sorts them afterwards: a moment's mean score changes while it grows.
    stretches = _Stretches(values, times, free, min(shortest, float(times[-1])))
    while (span := stretches.best()) is not None:
        first, last = _grow(values, times, free, *span, typical, longest)
        moments.append(Moment(float(times[first]), float(times[last]), _mean(values, times, first, last)))
        low = int(np.searchsorted(times[1:], times[first] - gap + _TINY, side="right"))
        high = int(np.searchsorted(times[:-1], times[last] + gap - _TINY))
        free[low:high] = False
        stretches.take(low, high)
    return sorted(moments, key=lambda moment: (-round(moment.score / _FLAT), moment.start))[:number]


class _Stretches:
    """For each clip, the shortest stretch of at least a given length that starts there; sorted by mean score."""

    def __init__(
        self, values: NDArray[np.float64], times: NDArray[np.float64], free: NDArray[np.bool_], least: float
    ) -> None:
        total = np.concatenate([[0.0], np.cumsum(np.where(free, values, 0.0) * np.diff(times))])
        taken = np.concatenate([[0], np.cumsum(~free)])
        lasts = np.searchsorted(times, times[:-1] + least - _TINY)  # index of the end at which a stretch is long enough
        self._lasts = lasts[lasts <= len(values)]
        firsts = np.arange(len(self._lasts))
        self._free = taken[self._lasts] == taken[firsts]
        means = (total[self._lasts] - total[firsts]) / (times[self._lasts] - times[firsts])
        self._order = np.argsort(-means, kind="stable")
        self._falling = means[self._order]
        self._at = 0  # position in the sorted order; no stretch before it is free

    def best(self) -> tuple[int, int] | None:
        """Returns the free stretch first:last with the highest mean (in a tie, the earliest); None if none is left."""
        while self._at < len(self._order) and not self._free[self._order[self._at]]:
            self._at += 1
        if self._at == len(self._order):
            return None
        end = np.searchsorted(-self._falling, _FLAT - self._falling[self._at], side="right")
        equals = self._order[self._at : int(end)]
        first = int(equals[self._free[equals]].min())
        return first, int(self._lasts[first])

    def take(self, low: int, high: int) -> None:
        """Marks the clips low:high as taken."""
        self._free[int(np.searchsorted(self._lasts, low, side="right")) : high] = False


def _grow(
    values: NDArray[np.float64],
    times: NDArray[np.float64],
    free: NDArray[np.bool_],
    first: int,
    last: int,
    typical: float,
    longest: float,
) -> tuple[int, int]:
    """Extends a stretch by the neighbouring clips that belong to it."""
    threshold = typical + _JOIN_FROM * max(_mean(values, times, first, last) - typical, 0.0) + _FLAT
    while True:
        sides = []
        if first > 0 and free[first - 1] and times[last] - times[first - 1] <= longest + _TINY:
            sides.append((values[first - 1], -1))
        if last < len(values) and free[last] and times[last + 1] - times[first] <= longest + _TINY:
            sides.append((values[last], 1))
        best, side = max(sides, default=(-np.inf, 0))  # in a tie, the later neighbour
        if best <= threshold:
            return first, last
        first, last = (first - 1, last) if side < 0 else (first, last + 1)


def _mean(values: NDArray[np.float64], times: NDArray[np.float64], first: int, last: int) -> float:
    return float(np.average(values[first:last], weights=np.diff(times[first : last + 1])))


def _check(clip_seconds: float, number: int, shortest: float, longest: float, gap: float) -> None:
    if not clip_seconds > 0:
        raise ConfigError(f"clip_seconds {clip_seconds}: expected more than 0")
    if number < 1:
        raise ConfigError(f"num_clips {number}: expected at least 1")
    if not 0 < shortest <= longest < float("inf"):
        raise ConfigError(f"shortest {shortest:g} and longest {longest:g}: expected 0 < shortest ≤ longest, in seconds")
    # Moments consist of whole clips: with clips of 2 s, a moment of at least 5 s is 6 s long.
    least = -(-shortest // clip_seconds) * clip_seconds
    if least > longest + _TINY:
        raise ConfigError(
            f"no number of clips of {clip_seconds:g} s lasts {shortest:g} to {longest:g} s; use --longest {least:g}"
        )
    if gap < 0:
        raise ConfigError(f"gap {gap:g}: expected 0 or more seconds")
