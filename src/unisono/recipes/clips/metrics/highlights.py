"""Metrics of highlight detection: how well scores agree with human labels.

The definitions follow the evaluation code of QVHighlights (jayleicn/moment_detr, standalone_eval) and of Mr. HiSum
(MRHiSum/MR.HiSum).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

_HISUM_SEGMENT_SECONDS = 5.0

Scores = NDArray[np.float64]


def interpolated_average_precision(positive: ArrayLike, scores: ArrayLike) -> float:
    """Average precision as in QVHighlights: averages, over recall levels, the best precision at that recall or higher.

    Clips with equal scores form one point of the curve, which counts once, no matter how many positives it adds.
    Without ties, this is the usual interpolated average precision; for constant scores it is the fraction of positives.
    Returns 0 without positives, and 1 if all clips are positive.
    """
    positive, scores = _checked(positive, scores)
    if positive.all() or not positive.any():
        return float(positive.any())
    num_positives, precision = _curve(positive, scores)
    best_from_here = np.maximum.accumulate(precision[::-1])[::-1]
    return float(best_from_here[np.diff(num_positives, prepend=0) > 0].mean())


def average_precision(positive: ArrayLike, scores: ArrayLike) -> float:
    """Average precision as in Mr. HiSum: the precision at each point, weighted by the recall that it adds.

    Clips with equal scores form one point, so their order does not matter. Returns NaN without positives.
    """
    positive, scores = _checked(positive, scores)
    if not positive.any():
        return math.nan
    num_positives, precision = _curve(positive, scores)
    return float((np.diff(num_positives, prepend=0) * precision).sum() / num_positives[-1])


def hit_at_1(positive: ArrayLike, scores: ArrayLike) -> float:
    """Returns 1 if the clip with the highest score (in a tie, the earliest) is positive, otherwise 0."""
    positive, scores = _checked(positive, scores)
    return float(positive[int(np.argmax(scores))]) if len(scores) else math.nan


def kendall_tau(truth: ArrayLike, scores: ArrayLike) -> float:
    """Kendall's τ-b: how well the order of all pairs of clips agrees, corrected for ties.

    Returns 0 for constant scores, and NaN for constant truth, which has no order.
    """
    a, b = _labelled(truth, scores)
    concordant = ties_a = ties_b = 0
    for index in range(len(a) - 1):  # row by row, because all pairs of a ten-hour video would not fit into memory
        order_a, order_b = np.sign(a[index + 1 :] - a[index]), np.sign(b[index + 1 :] - b[index])
        concordant += int((order_a * order_b).sum())
        ties_a += int((order_a == 0).sum())
        ties_b += int((order_b == 0).sum())
    pairs = len(a) * (len(a) - 1) // 2
    if pairs == ties_a:
        return math.nan
    return 0.0 if pairs == ties_b else concordant / math.sqrt((pairs - ties_a) * (pairs - ties_b))


def spearman_rho(truth: ArrayLike, scores: ArrayLike) -> float:
    """Spearman's ρ: the correlation of the ranks; equal values share their mean rank.

    Returns 0 for constant scores, and NaN for constant truth.
    """
    a, b = (_ranks(values) for values in _labelled(truth, scores))
    if not len(a) or np.ptp(a) == 0:
        return math.nan
    if np.ptp(b) == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def top_share_precision(truth: ArrayLike, scores: ArrayLike, share: float, clip_seconds: float = 2.0) -> float:
    """Mr. HiSum's MAP50 (`share` 0.5) or MAP15 (0.15) of one video.

    Truth and scores are averaged over segments of 5 seconds. The positives are the segments with the highest truth: the
    fraction `share` of all segments, rounded down, but at least one segment; in a tie, the earlier ones. Returns the
    average precision, or NaN if fewer than two segments are labelled or all have the same truth.
    """
    truth, scores = np.asarray(truth, np.float64), np.asarray(scores, np.float64)
    if truth.shape != scores.shape:
        raise ValueError(f"{scores.shape} scores for {truth.shape} labels")
    scores = np.where(np.isnan(truth), np.nan, scores)  # so that both are averaged over the same clips
    truth, scores = _labelled(segment_means(truth, clip_seconds), segment_means(scores, clip_seconds))
    if len(truth) < 2 or np.ptp(truth) == 0:
        return math.nan
    positive = np.zeros(len(truth), bool)
    positive[np.argsort(-truth, kind="stable")[: max(1, int(len(truth) * share))]] = True
    return average_precision(positive, scores)


def segment_means(
    values: ArrayLike, clip_seconds: float, segment_seconds: float = _HISUM_SEGMENT_SECONDS
) -> NDArray[np.float64]:
    """Averages the clips in each segment, weighted by their overlap; the last segment may be shorter.

    Ignores clips without a value (NaN); a segment that contains only such clips is NaN.
    """
    values = np.asarray(values, np.float64)
    has_value = ~np.isnan(values)
    ends = np.arange(len(values) + 1) * clip_seconds
    num_segments = math.ceil(ends[-1] / segment_seconds - 1e-9)
    cuts = np.minimum(np.arange(num_segments + 1) * segment_seconds, ends[-1])

    def between_cuts(per_clip: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.diff(np.interp(cuts, ends, np.concatenate([[0.0], np.cumsum(per_clip * clip_seconds)])))

    total, seconds = between_cuts(np.where(has_value, values, 0.0)), between_cuts(has_value.astype(np.float64))
    return np.divide(total, seconds, out=np.full(num_segments, np.nan), where=seconds > 1e-9)


def of_video(
    truth: ArrayLike, scores: ArrayLike, clip_seconds: float = 2.0, *, positive_from: float = 0.5
) -> dict[str, float]:
    """Computes all metrics of one video; NaN if undefined. Ignores unlabelled clips (truth NaN).

    A clip is positive if its truth is at least `positive_from`. mAP follows QVHighlights, except that it is NaN
    instead of 0 without a positive clip. A score that is not finite ranks below all others.
    """
    scores = np.asarray(scores, np.float64)
    finite = np.isfinite(scores)
    scores = np.where(finite, scores, scores[finite].min() - 1 if finite.any() else 0.0)
    labels, predictions = _labelled(truth, scores)
    positive = labels >= positive_from
    has_positive = bool(positive.any())
    return {
        "mAP": interpolated_average_precision(positive, predictions) if has_positive else math.nan,
        "HIT@1": hit_at_1(positive, predictions) if has_positive else math.nan,
        "kendall_tau": kendall_tau(labels, predictions),
        "spearman_rho": spearman_rho(labels, predictions),
        "MAP50": top_share_precision(truth, scores, 0.5, clip_seconds),
        "MAP15": top_share_precision(truth, scores, 0.15, clip_seconds),
    }


def _curve(positive: NDArray[np.bool_], scores: Scores) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the number of positives and the precision with each distinct score as the threshold, highest first."""
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.diff(scores[order], append=-np.inf))  # the last clip of each group of equal scores
    num_positives = np.cumsum(positive[order].astype(np.int64))[ends]
    return num_positives, num_positives / (ends + 1)


def _checked(positive: ArrayLike, scores: ArrayLike) -> tuple[NDArray[np.bool_], Scores]:
    positive, scores = np.asarray(positive).astype(bool), np.asarray(scores, np.float64)
    if positive.shape != scores.shape or positive.ndim != 1:
        raise ValueError(f"{scores.shape} scores for {positive.shape} labels")
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite to be ranked")
    return positive, scores


def _labelled(truth: ArrayLike, scores: ArrayLike) -> tuple[Scores, Scores]:
    """Returns the truth and the scores of the labelled clips."""
    truth, scores = np.asarray(truth, np.float64), np.asarray(scores, np.float64)
    if truth.shape != scores.shape or truth.ndim != 1:
        raise ValueError(f"{scores.shape} scores for {truth.shape} labels")
    is_labelled = ~np.isnan(truth)
    return truth[is_labelled], scores[is_labelled]


def _ranks(values: Scores) -> Scores:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[group]
