"""Evaluates files in QVHighlights' formats with its metrics: highlights (mAP, HIT@1) and moment retrieval.

A line of predictions has `qid`, and `pred_saliency_scores`, `pred_relevant_windows` (start, end, score; best first) or
both. A line of the ground truth has `qid`, `duration`, `relevant_clip_ids`, `saliency_scores` (0 to 4 from each
annotator for each relevant clip) and `relevant_windows` (start, end). The definitions follow the benchmark's evaluation
code (jayleicn/moment_detr, standalone_eval).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import EXIT_DONE, ConfigError
from unisono.recipes.clips.metrics.highlights import interpolated_average_precision
from unisono.recipes.clips.metrics.retrieval import moment_retrieval

LEVELS = {"Fair": 2, "Good": 3, "VeryGood": 4}
"""The lowest saliency of a highlight; the benchmark's headline numbers use VeryGood."""

SCORES, WINDOWS = "pred_saliency_scores", "pred_relevant_windows"
"""The keys of predictions."""

_QV_CLIP_SECONDS = 2
_MOST_BYTES = 2**30


def qvhighlights(
    predictions: Mapping[Any, Sequence[float]], ground_truth: Mapping[Any, NDArray[np.float64]], least: int = 4
) -> dict[str, float]:
    """Returns QVHighlights' mAP and HIT@1 in percent, from each query's scores [T] and saliency [T, annotators].

    For each annotator, the positives are the clips to which this annotator gave at least `least`. mAP is the mean of
    the average precision (0 without positives) over annotators and queries. HIT@1 is the fraction of queries whose
    highest-scoring clip is positive for any annotator. Missing scores are 0; a score after the end of the video counts
    as a miss in HIT@1.
    """
    precisions, hits = [], []
    for query, saliency in ground_truth.items():
        scores = np.asarray(predictions[query], np.float64)
        padded = np.zeros(len(saliency))
        padded[: len(scores)] = scores[: len(saliency)]
        positive = saliency >= least
        precisions.append(np.mean([interpolated_average_precision(column, padded) for column in positive.T]))
        best = int(np.argmax(scores))
        hits.append(best < len(positive) and bool(positive[best].any()))
    return {"mAP": round(100 * float(np.mean(precisions)), 2), "HIT@1": round(100 * float(np.mean(hits)), 2)}


def read_predictions(path: Path) -> dict[Any, list[float]]:
    """Reads the scores of each query from a file with QVHighlights predictions."""
    scores_of: dict[Any, list[float]] = {}
    for where, line in _lines(path):
        scores = line.get(SCORES)
        if not isinstance(scores, list) or not scores or not all(_is_number(score) for score in scores):
            raise ConfigError(f"{where}: {SCORES} must be a list of finite numbers")
        _add(scores_of, line, where, [float(score) for score in scores])
    return scores_of


def read_windows(path: Path, name: str, width: int) -> dict[Any, NDArray[np.float64]]:
    """Reads each query's windows [n, width]: `pred_relevant_windows` with scores, or `relevant_windows` without."""
    windows_of: dict[Any, NDArray[np.float64]] = {}
    for where, line in _lines(path):
        rows: Any = line.get(name)
        is_table = isinstance(rows, list) and all(isinstance(row, list) and len(row) >= width for row in rows)
        if not is_table or not all(_is_number(value) for row in rows for value in row[:width]):
            columns = ", ".join(("start", "end", "score")[:width])
            raise ConfigError(f"{where}: {name} must be a list of [{columns}], in seconds")
        windows = np.array([row[:width] for row in rows], dtype=np.float64).reshape(-1, width)
        if (windows[:, 1] < windows[:, 0]).any():
            raise ConfigError(f"{where}: {name}: a window ends before it starts")
        _add(windows_of, line, where, windows)
    return windows_of


def read_ground_truth(path: Path) -> dict[Any, NDArray[np.float64]]:
    """Reads each query's saliency [T, annotators] from a QVHighlights label file; 0 for clips that are not listed."""
    saliency_of: dict[Any, NDArray[np.float64]] = {}
    for where, line in _lines(path):
        duration, clips, rows = (line.get(name, "") for name in ("duration", "relevant_clip_ids", "saliency_scores"))
        if not _is_number(duration) or not _QV_CLIP_SECONDS <= float(duration) < 1e6:
            raise ConfigError(f"{where}: duration must be a number of seconds, at least {_QV_CLIP_SECONDS}")
        num_clips = int(float(duration) / _QV_CLIP_SECONDS)
        if not isinstance(clips, list) or not isinstance(rows, list) or len(clips) != len(rows):
            raise ConfigError(f"{where}: saliency_scores must have one entry for each of relevant_clip_ids")
        if not all(type(clip) is int and 0 <= clip < num_clips for clip in clips):
            raise ConfigError(f"{where}: relevant_clip_ids must be from 0 to {num_clips - 1} for this duration")
        widths = {len(row) if isinstance(row, list) else 0 for row in rows}
        if len(widths) > 1 or 0 in widths or not all(_is_number(score) for row in rows for score in row):
            raise ConfigError(f"{where}: saliency_scores must contain one number per annotator for each clip")
        saliency = np.zeros((num_clips, *(widths or {3})))
        if clips:
            saliency[clips] = rows
        _add(saliency_of, line, where, saliency)
    return saliency_of


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the lines of a .jsonl file, each with its location for error messages."""
    number = 0
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} has more than {_MOST_BYTES:,} bytes, too many for a file of QVHighlights")
        with path.open("rb") as file:  # in text mode, Python decodes ahead, so an error would name the wrong line
            for number, text in enumerate(file, 1):
                if text.strip():
                    line = json.loads(text.decode("utf-8-sig"))
                    if not isinstance(line, dict):
                        raise ConfigError(f"{path}, line {number}: not a JSON object")
                    yield f"{path}, line {number}", line
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):  # includes invalid UTF-8
        raise ConfigError(f"{path}, line {number}: not JSON; expected one JSON object per line") from None


def _add(values: dict[Any, Any], line: dict[str, Any], where: str, value: Any) -> None:
    query = line.get("qid")
    if not isinstance(query, str | int):
        raise ConfigError(f"{where}: qid must be a number or text")
    if query in values:
        raise ConfigError(f"{where}: qid {query} already occurs in an earlier line; it must be unique")
    values[query] = value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # False for NaN and infinity


def main(words: Sequence[str] | None = None) -> int:
    """Prints the metrics of a predictions file as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m unisono.recipes.clips.metrics",
        description="Print the metrics of QVHighlights in percent, as JSON: mAP and HIT@1 of saliency scores, and "
        "moment retrieval (mAP, R1) of windows, depending on what the predictions contain.",
    )
    parser.add_argument("--predictions", type=Path, required=True, help=f"jsonl with qid, and {SCORES} or {WINDOWS}")
    parser.add_argument(
        "--ground_truth",
        "--ground-truth",
        type=Path,
        required=True,
        help="jsonl with qid, duration, relevant_clip_ids, saliency_scores and, for windows, relevant_windows",
    )
    options = parser.parse_args(words)
    first_prediction, first_truth = (
        next(_lines(path), ("", {}))[1] for path in (options.predictions, options.ground_truth)
    )
    only_windows = WINDOWS in first_prediction and SCORES not in first_prediction
    metrics: dict[str, Any] = {}
    if not only_windows:
        predictions, truth = read_predictions(options.predictions), read_ground_truth(options.ground_truth)
        _check_queries(predictions, truth, options)
        levels = {name: qvhighlights(predictions, truth, least) for name, least in LEVELS.items()}
        metrics |= {**levels["VeryGood"], "num_queries": len(truth), "by_level": levels}
    if only_windows or (WINDOWS in first_prediction and "relevant_windows" in first_truth):
        windows = read_windows(options.predictions, WINDOWS, 3)
        labelled = read_windows(options.ground_truth, "relevant_windows", 2)
        _check_queries(windows, labelled, options)
        metrics |= {"num_queries": len(labelled), "moment_retrieval": moment_retrieval(windows, labelled)}
    print(json.dumps(metrics, indent=2))
    return EXIT_DONE


def _check_queries(predictions: Mapping[Any, Any], truth: Mapping[Any, Any], options: argparse.Namespace) -> None:
    if not truth:
        raise ConfigError(f"{options.ground_truth} contains no query")
    missing, unknown = truth.keys() - predictions.keys(), predictions.keys() - truth.keys()
    if missing or unknown:
        some = ", ".join(str(query) for query in sorted(missing or unknown, key=str)[:3])
        problem = "has no line for" if missing else "has queries that are not in the ground truth:"
        raise ConfigError(f"{options.predictions} {problem} {some} …; both files must contain the same queries")
