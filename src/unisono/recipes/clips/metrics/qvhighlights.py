"""QVHighlights' evaluation of its own files: highlights (mAP, HIT@1) and moment retrieval, as it defines them.

A line of predictions holds `qid` and `pred_saliency_scores`, `pred_relevant_windows` (start, end, score; best first)
or both; a line of the ground truth `qid`, `duration`, `relevant_clip_ids` and `saliency_scores` (each annotator's 0 to
4 for each relevant clip), and `relevant_windows` (start, end). The definitions are those of the benchmark's own
evaluation (jayleicn/moment_detr, standalone_eval).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import EXIT_DONE, ConfigError
from unisono.recipes.clips.metrics.highlights import interpolated_average_precision
from unisono.recipes.clips.metrics.retrieval import moment_retrieval

LEVELS = {"Fair": 2, "Good": 3, "VeryGood": 4}
"""The least score that makes a clip a highlight; the benchmark's headline numbers are those of VeryGood."""

SCORES, WINDOWS = "pred_saliency_scores", "pred_relevant_windows"
"""What a line of predictions may hold."""

_QV_CLIP_SECONDS = 2
_MOST_BYTES = 2**30


def qvhighlights(
    predictions: Mapping[Any, Sequence[float]], ground_truth: Mapping[Any, NDArray[np.float64]], least: int = 4
) -> dict[str, float]:
    """QVHighlights' mAP and HIT@1 in percent, from scores [T] and saliency [T, annotators] of each query.

    Each annotator's clips from `least` on are one set of positives with an average precision of its own; mAP is the
    mean over annotators and queries (an annotator without any counts as 0). HIT@1 asks whether any annotator marked the
    clip of the highest score. Missing scores are 0, and scores behind the video's end count for HIT@1 only, as a miss.
    """
    precisions, hits = [], []
    for query, saliency in ground_truth.items():
        scores = np.asarray(predictions[query], np.float64)
        padded = np.zeros(len(saliency))
        padded[: len(scores)] = scores[: len(saliency)]
        marked = saliency >= least
        precisions.append(np.mean([interpolated_average_precision(column, padded) for column in marked.T]))
        best = int(np.argmax(scores))
        hits.append(best < len(marked) and bool(marked[best].any()))
    return {"mAP": round(100 * float(np.mean(precisions)), 2), "HIT@1": round(100 * float(np.mean(hits)), 2)}


def read_predictions(path: Path) -> dict[Any, list[float]]:
    """The scores of each query in a file of QVHighlights predictions."""
    found: dict[Any, list[float]] = {}
    for where, line in _lines(path):
        scores = line.get(SCORES)
        if not isinstance(scores, list) or not scores or not all(_is_number(score) for score in scores):
            raise ConfigError(f"{where}: {SCORES} must be a list of finite numbers")
        _add(found, line, where, [float(score) for score in scores])
    return found


def read_windows(path: Path, name: str, width: int) -> dict[Any, NDArray[np.float64]]:
    """The windows [n, width] of each query: `pred_relevant_windows` with scores, or `relevant_windows` without."""
    found: dict[Any, NDArray[np.float64]] = {}
    for where, line in _lines(path):
        rows: Any = line.get(name)
        fits = isinstance(rows, list) and all(isinstance(row, list) and len(row) >= width for row in rows)
        if not fits or not all(_is_number(value) for row in rows for value in row[:width]):
            columns = ", ".join(("start", "end", "score")[:width])
            raise ConfigError(f"{where}: {name} must be a list of [{columns}], in seconds")
        windows = np.array([row[:width] for row in rows], dtype=np.float64).reshape(-1, width)
        if (windows[:, 1] < windows[:, 0]).any():
            raise ConfigError(f"{where}: {name}: a window ends before it begins")
        _add(found, line, where, windows)
    return found


def _holds(path: Path) -> list[str]:
    """Which kinds of predictions the first line has."""
    first = next(iter(_lines(path)), ("", {}))[1]
    return [name for name in (SCORES, WINDOWS) if name in first] or [SCORES]


def read_ground_truth(path: Path) -> dict[Any, NDArray[np.float64]]:
    """The saliency [T, annotators] of each query in a file of QVHighlights labels; 0 for clips not relevant."""
    found: dict[Any, NDArray[np.float64]] = {}
    for where, line in _lines(path):
        duration, clips, rows = (line.get(name, "") for name in ("duration", "relevant_clip_ids", "saliency_scores"))
        if not _is_number(duration) or not _QV_CLIP_SECONDS <= float(duration) < 1e6:
            raise ConfigError(f"{where}: duration must be the video's length in seconds, at least {_QV_CLIP_SECONDS}")
        num_clips = int(float(duration) / _QV_CLIP_SECONDS)
        if not isinstance(clips, list) or not isinstance(rows, list) or len(clips) != len(rows):
            raise ConfigError(f"{where}: saliency_scores must have one entry for each of relevant_clip_ids")
        if not all(type(clip) is int and 0 <= clip < num_clips for clip in clips):
            raise ConfigError(f"{where}: relevant_clip_ids must lie in 0 to {num_clips - 1}, as the duration says")
        widths = {len(row) if isinstance(row, list) else 0 for row in rows}
        if len(widths) > 1 or 0 in widths or not all(_is_number(score) for row in rows for score in row):
            raise ConfigError(
                f"{where}: saliency_scores must hold the same number of annotators' numbers for each clip"
            )
        saliency = np.zeros((num_clips, *(widths or {3})))
        if clips:
            saliency[clips] = rows
        _add(found, line, where, saliency)
    return found


def _lines(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    number = 0
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} has more than {_MOST_BYTES:,} bytes; it is no file of QVHighlights'")
        with path.open("rb") as file:  # as bytes, which are read line by line; text is decoded some lines ahead
            for number, text in enumerate(file, 1):
                if text.strip():
                    line = json.loads(text.decode("utf-8-sig"))
                    if not isinstance(line, dict):
                        raise ConfigError(f"{path}, line {number}: not a JSON object")
                    yield f"{path}, line {number}", line
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):  # what is not UTF-8 is a ValueError too
        raise ConfigError(f"{path}, line {number}: not JSON; write one JSON object to a line") from None


def _add(found: dict[Any, Any], line: dict[str, Any], where: str, value: Any) -> None:
    query = line.get("qid")
    if not isinstance(query, str | int):
        raise ConfigError(f"{where}: qid must be a number or text")
    if query in found:
        raise ConfigError(f"{where}: qid {query} was there before; keep one line of each")
    found[query] = value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # NaN and infinity are none


def main(words: Sequence[str] | None = None) -> int:
    """Prints the measures of a file of predictions as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m unisono.recipes.clips.metrics",
        description="QVHighlights' own measures, in percent, as JSON: mAP and HIT@1 of saliency scores, and moment "
        "retrieval (mAP, R1) of windows, whichever the predictions hold.",
    )
    parser.add_argument("--predictions", type=Path, required=True, help=f"jsonl with qid, and {SCORES} or {WINDOWS}")
    parser.add_argument(
        "--ground_truth",
        "--ground-truth",
        type=Path,
        required=True,
        help="jsonl with qid, duration, relevant_clip_ids and saliency_scores; for windows relevant_windows",
    )
    options = parser.parse_args(words)
    kinds = _holds(options.predictions)
    content: dict[str, Any] = {}
    if SCORES in kinds:
        predictions, truth = read_predictions(options.predictions), read_ground_truth(options.ground_truth)
        _check_queries(predictions, truth, options)
        levels = {name: qvhighlights(predictions, truth, least) for name, least in LEVELS.items()}
        content |= {**levels["VeryGood"], "num_queries": len(truth), "by_level": levels}
    first = next(iter(_lines(options.ground_truth)), ("", {}))[1]
    if WINDOWS in kinds and (kinds == [WINDOWS] or "relevant_windows" in first):
        windows = read_windows(options.predictions, WINDOWS, 3)
        marked = read_windows(options.ground_truth, "relevant_windows", 2)
        _check_queries(windows, marked, options)
        content |= {"num_queries": len(marked), "moment_retrieval": moment_retrieval(windows, marked)}
    print(json.dumps(content, indent=2))
    return EXIT_DONE


def _check_queries(predictions: Mapping[Any, Any], truth: Mapping[Any, Any], options: argparse.Namespace) -> None:
    if not truth:
        raise ConfigError(f"{options.ground_truth} holds no query")
    lacking, unknown = truth.keys() - predictions.keys(), predictions.keys() - truth.keys()
    if lacking or unknown:
        some = ", ".join(str(query) for query in sorted(lacking or unknown, key=str)[:3])
        what = "has no scores for" if lacking else "has scores for queries that the ground truth does not have:"
        raise ConfigError(f"{options.predictions} {what} {some} …; both files must hold the same queries")
