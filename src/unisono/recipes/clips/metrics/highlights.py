"""How well scores find what people marked: the field's measures in plain numpy.

The definitions are those of QVHighlights' own evaluation (jayleicn/moment_detr, standalone_eval) and of Mr. HiSum's
(MRHiSum/MR.HiSum). As a command, this file evaluates predictions in QVHighlights' formats (`qvhighlights.py`):

    python -m unisono.recipes.clips.metrics --predictions P.jsonl --ground_truth G.jsonl
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

_HISUM_SEGMENT_SECONDS = 5.0

Scores = NDArray[np.float64]


def interpolated_average_precision(positive: ArrayLike, scores: ArrayLike) -> float:
    """QVHighlights' average precision: the mean, over recall levels, of the best precision at that recall or beyond.

    Clips of equal score are found together, as one point of the curve. Each point that finds a positive counts once,
    however many it finds: without ties that is the usual interpolated precision, and constant scores get the share of
    positives. 0 where nothing is positive, 1 where everything is.
    """
    marks, order = _checked(positive, scores)
    if marks.all() or not marks.any():
        return float(marks.any())
    found, precision = _curve(marks, order)
    best_from_here = np.maximum.accumulate(precision[::-1])[::-1]
    finds = np.diff(found, prepend=0) > 0
    return float(best_from_here[finds].mean())


def average_precision(positive: ArrayLike, scores: ArrayLike) -> float:
    """The plain average precision, as Mr. HiSum takes it: precision at each point, weighted by the recall it adds.

    Clips of equal score are found together, so their order does not matter. NaN where nothing is positive.
    """
    marks, order = _checked(positive, scores)
    if not marks.any():
        return math.nan
    found, precision = _curve(marks, order)
    return float((np.diff(found, prepend=0) * precision).sum() / found[-1])


def hit_at_1(positive: ArrayLike, scores: ArrayLike) -> float:
    """1 if the clip of the highest score is positive, otherwise 0; of equal scores the earliest clip counts."""
    marks, values = _checked(positive, scores)
    return float(marks[int(np.argmax(values))]) if len(values) else math.nan


def kendall_tau(truth: ArrayLike, scores: ArrayLike) -> float:
    """Kendall's τ-b: how often two clips stand in the same order in both, with ties corrected for.

    0 for constant scores, which order nothing; NaN for constant truth, which has no order to find.
    """
    a, b = _known(truth, scores)
    concordant = ties_a = ties_b = 0
    for at in range(len(a) - 1):  # row by row: all pairs of a ten-hour video at once would not fit into memory
        one, other = np.sign(a[at + 1 :] - a[at]), np.sign(b[at + 1 :] - b[at])
        concordant += int((one * other).sum())
        ties_a += int((one == 0).sum())
        ties_b += int((other == 0).sum())
    pairs = len(a) * (len(a) - 1) // 2
    if pairs == ties_a:
        return math.nan
    return 0.0 if pairs == ties_b else concordant / math.sqrt((pairs - ties_a) * (pairs - ties_b))


def spearman_rho(truth: ArrayLike, scores: ArrayLike) -> float:
    """Spearman's ρ: the correlation of the ranks; equal values share the mean of theirs.

    0 for constant scores, NaN for constant truth.
    """
    a, b = (_ranks(values) for values in _known(truth, scores))
    if not len(a) or np.ptp(a) == 0:
        return math.nan
    if np.ptp(b) == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def top_share_precision(truth: ArrayLike, scores: ArrayLike, share: float, clip_seconds: float = 2.0) -> float:
    """Mr. HiSum's MAP50 (share 0.5) and MAP15 (0.15) of one video.

    Both curves are averaged over segments of 5 seconds; the best `share` of the segments by truth (rounded down, but at
    least one) are the positives, and the result is their plain average precision. Of equal truth the earlier segment
    is taken. NaN where fewer than two segments are labelled, or all are alike.
    """
    wanted, got = np.asarray(truth, np.float64), np.asarray(scores, np.float64)
    if wanted.shape != got.shape:
        raise ValueError(f"{got.shape} scores for {wanted.shape} labels")
    got = np.where(np.isnan(wanted), np.nan, got)  # both curves are averaged over the same clips
    wanted, got = segment_means(wanted, clip_seconds), segment_means(got, clip_seconds)
    wanted, got = _known(wanted, got)
    if len(wanted) < 2 or np.ptp(wanted) == 0:
        return math.nan
    positive = np.zeros(len(wanted), bool)
    positive[np.argsort(-wanted, kind="stable")[: max(1, int(len(wanted) * share))]] = True
    return average_precision(positive, got)


def segment_means(
    values: ArrayLike, clip_seconds: float, segment_seconds: float = _HISUM_SEGMENT_SECONDS
) -> NDArray[np.float64]:
    """The mean of a curve over each segment; a clip that lies in two segments counts in each for the part it has there.

    Clips without a value are left out of the mean; a segment without any has none. The last segment may be shorter.
    """
    values = np.asarray(values, np.float64)
    known = ~np.isnan(values)
    ends = np.arange(len(values) + 1) * clip_seconds
    num_segments = math.ceil(ends[-1] / segment_seconds - 1e-9)
    cuts = np.minimum(np.arange(num_segments + 1) * segment_seconds, ends[-1])

    def between_cuts(per_clip: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.diff(np.interp(cuts, ends, np.concatenate([[0.0], np.cumsum(per_clip * clip_seconds)])))

    total, seconds = between_cuts(np.where(known, values, 0.0)), between_cuts(known.astype(np.float64))
    return np.divide(total, seconds, out=np.full(num_segments, np.nan), where=seconds > 1e-9)


def of_video(
    truth: ArrayLike, scores: ArrayLike, clip_seconds: float = 2.0, *, positive_from: float = 0.5
) -> dict[str, float]:
    """Every measure of one video; NaN where it has none. Clips whose truth is NaN (not labelled) are left out.

    A clip is positive from `positive_from` on; mAP follows QVHighlights, except that a video without a positive clip
    has none instead of 0. A score that is no number is below all others. `mean_of` gives the measure of many videos.
    """
    scores = np.asarray(scores, np.float64)
    finite = np.isfinite(scores)
    scores = np.where(finite, scores, scores[finite].min() - 1 if finite.any() else 0.0)
    wanted, got = _known(truth, scores)
    positive = wanted >= positive_from
    marked = bool(positive.any())
    return {
        "mAP": interpolated_average_precision(positive, got) if marked else math.nan,
        "HIT@1": hit_at_1(positive, got) if marked else math.nan,
        "kendall_tau": kendall_tau(wanted, got),
        "spearman_rho": spearman_rho(wanted, got),
        "MAP50": top_share_precision(truth, scores, 0.5, clip_seconds),
        "MAP15": top_share_precision(truth, scores, 0.15, clip_seconds),
    }


def mean_of(videos: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each measure over the videos that have it; NaN where none has."""
    found: dict[str, list[float]] = {}
    for video in videos:
        for name, value in video.items():
            found.setdefault(name, []).extend([] if math.isnan(value) else [value])
    return {name: sum(values) / len(values) if values else math.nan for name, values in found.items()}


def _curve(marks: NDArray[np.bool_], scores: Scores) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """For each distinct score, highest first: how many positives lie at or above it, and the share they are there."""
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.diff(scores[order], append=-np.inf))  # the last clip of each group of equals
    found = np.cumsum(marks[order].astype(np.int64))[ends]
    return found, found / (ends + 1)


def _checked(positive: ArrayLike, scores: ArrayLike) -> tuple[NDArray[np.bool_], Scores]:
    marks, values = np.asarray(positive).astype(bool), np.asarray(scores, np.float64)
    if marks.shape != values.shape or marks.ndim != 1:
        raise ValueError(f"{values.shape} scores for {marks.shape} labels")
    if not np.isfinite(values).all():
        raise ValueError("scores that are not finite have no order")
    return marks, values


def _known(truth: ArrayLike, scores: ArrayLike) -> tuple[Scores, Scores]:
    """Both curves where the truth is known."""
    wanted, got = np.asarray(truth, np.float64), np.asarray(scores, np.float64)
    if wanted.shape != got.shape or wanted.ndim != 1:
        raise ValueError(f"{got.shape} scores for {wanted.shape} labels")
    known = ~np.isnan(wanted)
    return wanted[known], got[known]


def _ranks(values: Scores) -> Scores:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[group]
