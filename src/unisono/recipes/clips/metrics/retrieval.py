"""Moment retrieval: how well predicted windows match the labelled windows of a query.

The metrics follow the evaluation code of QVHighlights (jayleicn/moment_detr, standalone_eval), in percent:

- mAP at a threshold of the intersection over union (IoU): predictions are matched with labelled windows, in order of
  their scores. A prediction matches the unmatched window with the largest IoU, if this IoU reaches the threshold. The
  interpolated average precision is averaged over queries. `mAP` is the mean over the thresholds 0.5, 0.55 … 0.95.
- R1 at a threshold: the fraction of queries whose first prediction has at least this IoU with any labelled window.
- short, middle, long: mAP for labelled windows of up to 10, 10 to 30, and 30 to 150 seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

THRESHOLDS = tuple(round(0.5 + 0.05 * step, 2) for step in range(10))
LENGTHS = {"short": (0.0, 10.0), "middle": (10.0, 30.0), "long": (30.0, 150.0)}
"""Ranges of window lengths in seconds: above the first number, up to and including the second."""
MOST_WINDOWS = 10
"""Number of predictions per query that count."""

Windows = NDArray[np.float64]


def moment_retrieval(predictions: Mapping[object, Windows], truth: Mapping[object, Windows]) -> dict[str, float]:
    """Computes the metrics from each query's predicted windows [n, 3] (start, end, score) and labelled windows [m, 2].

    Only the first ten predictions in the list count. R1 uses the first prediction; mAP sorts the predictions by score.
    A query without labelled windows or without predictions counts as 0.
    """
    first_iou = np.array([_best_iou(predictions[query][:1], windows) for query, windows in truth.items()])
    precisions = _precisions(predictions, truth)
    metrics = {
        "mAP": _mean(precisions),
        "mAP@0.5": _mean(precisions[:, THRESHOLDS.index(0.5)]),
        "mAP@0.75": _mean(precisions[:, THRESHOLDS.index(0.75)]),
        "R1@0.5": _mean(first_iou >= 0.5),
        "R1@0.7": _mean(first_iou >= 0.7),
    }
    for name, (above, up_to) in LENGTHS.items():
        of_length = {query: windows[_between(windows, above, up_to)] for query, windows in truth.items()}
        not_empty = {query: windows for query, windows in of_length.items() if len(windows)}
        metrics[f"{name}_mAP"] = _mean(_precisions(predictions, not_empty))
    return metrics


def average_precisions(predicted: Windows, labelled: Windows) -> NDArray[np.float64]:
    """Returns the interpolated average precision [len(THRESHOLDS)] of one query's predictions at each threshold."""
    if not len(predicted) or not len(labelled):
        return np.zeros(len(THRESHOLDS))
    predicted = predicted[:MOST_WINDOWS]
    iou = intersection_over_union(predicted[np.argsort(-predicted[:, 2], kind="stable")], labelled)
    return np.array([_average_precision(iou, threshold) for threshold in THRESHOLDS])


def intersection_over_union(a: Windows, b: Windows) -> NDArray[np.float64]:
    """Returns the IoU [n, m] of n and m windows, whose first columns are start and end; 0 if both windows are empty."""
    starts, ends = np.maximum(a[:, None, 0], b[None, :, 0]), np.minimum(a[:, None, 1], b[None, :, 1])
    intersection = np.maximum(ends - starts, 0.0)
    union = (a[:, 1] - a[:, 0])[:, None] + (b[:, 1] - b[:, 0])[None] - intersection
    return np.asarray(np.divide(intersection, union, out=np.zeros_like(intersection), where=union > 0))


def _average_precision(iou: NDArray[np.float64], threshold: float) -> float:
    hits = np.zeros(len(iou))
    unmatched = np.ones(iou.shape[1], bool)
    for rank, row in enumerate(iou):
        candidates = np.where(unmatched & (row >= threshold), row, -1.0)
        best = len(candidates) - 1 - int(np.argmax(candidates[::-1]))  # in a tie, the last one, as in the benchmark
        if candidates[best] >= 0:
            hits[rank], unmatched[best] = 1.0, False
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    best_from_here = np.maximum.accumulate(precision[::-1])[::-1]
    return float((best_from_here * hits).sum() / iou.shape[1])


def _precisions(predictions: Mapping[object, Windows], truth: Mapping[object, Windows]) -> NDArray[np.float64]:
    rows = [average_precisions(predictions[query], windows) for query, windows in truth.items()]
    return np.array(rows).reshape(-1, len(THRESHOLDS))


def _best_iou(predicted: Windows, labelled: Windows) -> float:
    return float(intersection_over_union(predicted, labelled).max()) if len(predicted) and len(labelled) else 0.0


def _between(windows: Windows, above: float, up_to: float) -> NDArray[np.bool_]:
    lengths = windows[:, 1] - windows[:, 0]
    return np.asarray((lengths > above) & (lengths <= up_to))


def _mean(values: NDArray[np.float64] | NDArray[np.bool_]) -> float:
    """Returns the mean in percent, rounded as in the benchmark; 0 without values."""
    return round(100 * float(np.mean(values)), 2) if values.size else 0.0
