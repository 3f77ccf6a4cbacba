"""Moment retrieval: how well predicted windows match the windows that people marked for a query.

The measures are those of QVHighlights' own evaluation (jayleicn/moment_detr, standalone_eval), in percent:

- mAP at a threshold: predictions, best score first, each take the free marked window that they overlap most, if their
  intersection over union (IoU) reaches the threshold; the average precision is interpolated, of one query at a time,
  and averaged over queries. `mAP` is the mean over the thresholds 0.5, 0.55 … 0.95.
- R1 at a threshold: the share of queries whose first prediction reaches it with any marked window.
- short, middle, long: mAP of the marked windows of up to 10, up to 30, and up to 150 seconds alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

THRESHOLDS = tuple(round(0.5 + 0.05 * step, 2) for step in range(10))
LENGTHS = {"short": (0.0, 10.0), "middle": (10.0, 30.0), "long": (30.0, 150.0)}
"""Seconds: above the first, up to the second."""
MOST_WINDOWS = 10
"""Predictions of a query that count."""

Windows = NDArray[np.float64]


def moment_retrieval(predictions: Mapping[object, Windows], truth: Mapping[object, Windows]) -> dict[str, float]:
    """The measures, from predicted windows [n, 3] (start, end, score) and marked windows [m, 2] of each query.

    The order of predictions decides which one is first, and which ten count; among those, the score does. A query of
    which nothing was marked counts as 0, as one without predictions does.
    """
    first = [_best_overlap(predictions[query], windows) for query, windows in truth.items()]
    at = _precisions(predictions, truth)
    found = {
        "mAP": _mean(at),
        "mAP@0.5": _mean(at[:, THRESHOLDS.index(0.5)]),
        "mAP@0.75": _mean(at[:, THRESHOLDS.index(0.75)]),
        "R1@0.5": _mean(np.array(first) >= 0.5),
        "R1@0.7": _mean(np.array(first) >= 0.7),
    }
    for name, (above, up_to) in LENGTHS.items():
        some = {query: windows[_between(windows, above, up_to)] for query, windows in truth.items()}
        found[f"{name}_mAP"] = _mean(_precisions(predictions, {q: each for q, each in some.items() if len(each)}))
    return found


def average_precisions(predicted: Windows, marked: Windows) -> NDArray[np.float64]:
    """[len(THRESHOLDS)] the interpolated average precision of one query's predictions at each threshold."""
    if not len(predicted) or not len(marked):
        return np.zeros(len(THRESHOLDS))
    predicted = predicted[:MOST_WINDOWS]
    overlaps = intersection_over_union(predicted[np.argsort(-predicted[:, 2], kind="stable")], marked)
    return np.array([_average_precision(overlaps, threshold) for threshold in THRESHOLDS])


def intersection_over_union(one: Windows, other: Windows) -> NDArray[np.float64]:
    """[n, m] of windows that begin and end with their first two columns; 0 where both are empty."""
    starts, ends = np.maximum(one[:, None, 0], other[None, :, 0]), np.minimum(one[:, None, 1], other[None, :, 1])
    common = np.maximum(ends - starts, 0.0)
    lengths = (one[:, 1] - one[:, 0])[:, None] + (other[:, 1] - other[:, 0])[None]
    union = lengths - common
    return np.asarray(np.divide(common, union, out=np.zeros_like(common), where=union > 0))


def _average_precision(overlaps: NDArray[np.float64], threshold: float) -> float:
    hits = np.zeros(len(overlaps))
    free = np.ones(overlaps.shape[1], bool)
    for place, row in enumerate(overlaps):
        fitting = np.where(free & (row >= threshold), row, -1.0)
        best = len(fitting) - 1 - int(np.argmax(fitting[::-1]))  # of equals the last one, as the benchmark does
        if fitting[best] >= 0:
            hits[place], free[best] = 1.0, False
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    best_from_here = np.maximum.accumulate(precision[::-1])[::-1]
    return float((best_from_here * hits).sum() / overlaps.shape[1])


def _precisions(predictions: Mapping[object, Windows], truth: Mapping[object, Windows]) -> NDArray[np.float64]:
    rows = [average_precisions(predictions[query], windows) for query, windows in truth.items()]
    return np.array(rows).reshape(-1, len(THRESHOLDS))


def _best_overlap(predicted: Windows, marked: Windows) -> float:
    if not len(predicted) or not len(marked):
        return 0.0
    return float(intersection_over_union(predicted[:1], marked).max())


def _between(windows: Windows, above: float, up_to: float) -> NDArray[np.bool_]:
    lengths = windows[:, 1] - windows[:, 0]
    return np.asarray((lengths > above) & (lengths <= up_to))


def _mean(values: NDArray[np.float64] | NDArray[np.bool_]) -> float:
    """In percent, as the benchmark rounds; 0 of nothing."""
    return round(100 * float(np.mean(values)), 2) if values.size else 0.0
