"""Parses the supported label formats; every error message names the line.

- labels.csv: video,start,end,score, with times in seconds (or as 1:02:03.5). Parts of the video that no line covers
  have the score 0; a line without a score marks a part as unlabelled.
- .jsonl files of QVHighlights: saliency scores (0 to 4) of three annotators for clips of 2 s; other clips score 0.
- .h5 files of Mr. HiSum: features and gtscore (0 to 1) for every second.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.config.values import shown
from unisono.errors import ConfigError
from unisono.recipes.clips.data.feature_files import FeatureFile, child, opened_h5, table
from unisono.recipes.common.tree import Tree

COLUMNS = ("video", "start", "end", "score")
KINDS = (".csv", ".jsonl", ".h5", ".hdf5")

_QV_SECONDS, _QV_BEST = 2.0, 4.0
_HISUM_SECONDS = 1.0
_MOST_BYTES = 2**32


@dataclass(frozen=True)
class LabelEntry:
    """One line of a CSV or JSON-lines file, or one group of an HDF5 file."""

    where: str  # file and line, for error messages
    name: str  # name of the video in the file
    segments: NDArray[np.float64]  # [n, 3] start, end and score (0 to 1, or NaN: unlabelled)
    rest: float = 0.0  # the score outside the segments
    duration: float | None = None
    features: FeatureFile | None = None  # only Mr. HiSum's files contain features
    query: str | None = None
    qid: int | str | None = None
    raters: dict[int, tuple[float, ...]] = field(default_factory=dict)


def labels_in(file: Path, highest_score: float) -> Iterator[LabelEntry]:
    """Yields the entries of a label file, in its order."""
    if file.suffix.lower() == ".csv":
        return _csv(file, highest_score)
    return _qvhighlights(file) if file.suffix.lower() == ".jsonl" else _hisum(file)


def _csv(file: Path, highest: float) -> Iterator[LabelEntry]:
    # strict=True, because otherwise an unclosed quote would swallow the rest of the file.
    lines = Tree(file.parent).lines(file.name, _MOST_BYTES)
    reader = csv.reader((f"{line}\n" for _, line in lines), strict=True)
    try:
        header = [name.strip().lower() for name in next(reader, [])]
        if missing := [name for name in COLUMNS if name not in header]:
            raise ConfigError(
                f"{file}, line 1: no column {missing[0]!r}; the first line must name the columns "
                f"{','.join(COLUMNS)}, comma-separated"
            )
        columns = [header.index(name) for name in COLUMNS]
        for cells in reader:
            where = f"{file}, line {reader.line_num}"
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(header):
                raise ConfigError(f"{where}: {len(cells)} fields, but the first line has {len(header)} columns")
            name, start, end, score = (cells[column].strip() for column in columns)
            begin, stop = _time(start, "start", where), _time(end, "end", where)
            if not name:
                raise ConfigError(f"{where}: the column video is empty")
            if begin >= stop:
                raise ConfigError(f"{where}: start {shown(start)} is not before end {shown(end)}")
            yield LabelEntry(where, name, np.array([[begin, stop, _score(score, highest, where)]]))
    except csv.Error as error:
        raise ConfigError(f"{file}, line {reader.line_num}: invalid CSV ({error})") from None


def _time(text: str, name: str, where: str) -> float:
    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3 or not all(0 <= number < math.inf for number in numbers):
        raise ConfigError(f"{where}: {name} {shown(text)}: expected seconds, or 1:02:03.5")
    return sum(number * 60.0**place for place, number in enumerate(reversed(numbers)))


def _score(text: str, highest: float, where: str) -> float:
    if not text:
        return math.nan
    try:
        score = float(text)
    except ValueError:
        raise ConfigError(f"{where}: score {shown(text)}: expected a number, or nothing") from None
    if not 0 <= score <= highest:
        raise ConfigError(
            f"{where}: score {text} is not between 0 and {highest:g}; if your scores can be higher, pass the "
            "highest possible score as --highest_score"
        )
    return score / highest


def _qvhighlights(file: Path) -> Iterator[LabelEntry]:
    line_of_qid: dict[Any, str] = {}
    for number, line in Tree(file.parent).lines(file.name, _MOST_BYTES):
        where = f"{file}, line {number}"
        if line.strip():
            entry = _query(line, where)
            if entry.qid is not None and line_of_qid.setdefault(entry.qid, where) != where:
                first = line_of_qid[entry.qid]
                raise ConfigError(f"{where}: qid {shown(entry.qid)} already occurs in {first}; it must be unique")
            yield entry


def _query(line: str, where: str) -> LabelEntry:
    try:
        entry = json.loads(line)
        name, duration, clips = (
            entry["vid"],
            float(entry["duration"]),
            [int(clip) for clip in entry["relevant_clip_ids"]],
        )
        saliency = [tuple(float(each) for each in scores) for scores in entry["saliency_scores"]]
        qid, query = entry.get("qid"), entry.get("query")
        if not isinstance(name, str) or not isinstance(qid, int | str | None):
            raise TypeError("vid must be text, and qid a number or text")
        raters = dict(zip(clips, saliency, strict=True))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"{where}: not in the format of QVHighlights ({type(error).__name__}: {str(error)[:100]}); expected qid, "
            "query, vid, duration, relevant_clip_ids and saliency_scores (its test split has no labels)"
        ) from None
    total = math.ceil(duration / _QV_SECONDS - 1e-6) if 0 < duration < 1e7 else 0
    if not total or len(raters) < len(clips) or not all(0 <= clip < total for clip in clips):
        raise ConfigError(
            f"{where}: relevant_clip_ids {shown(clips)}: expected distinct numbers from 0 to {max(0, total - 1)} "
            f"for {duration:g} s in clips of 2 s"
        )
    for clip, scores in raters.items():
        if not scores or not all(0 <= score <= _QV_BEST for score in scores):
            raise ConfigError(
                f"{where}: saliency {shown(list(scores))} of clip {clip}: expected 0 to 4 from each annotator"
            )
    rows = [
        (clip * _QV_SECONDS, (clip + 1) * _QV_SECONDS, sum(scores) / len(scores) / _QV_BEST)
        for clip, scores in sorted(raters.items())
    ]
    return LabelEntry(
        where,
        name,
        np.array(rows, dtype=np.float64).reshape(-1, 3),
        duration=duration,
        query=query if isinstance(query, str) else None,
        qid=qid,
        raters=raters,
    )


def _hisum(file: Path) -> Iterator[LabelEntry]:
    with opened_h5(file) as groups:
        for name in groups:
            where = f"{file}, {name}"
            group = child(file, groups, name)
            scores, num_rows = table(file, group, "gtscore"), len(child(file, group, "features"))
            if scores.ndim != 1 or len(scores) != num_rows or not num_rows:
                raise ConfigError(f"{where}: gtscore of shape {scores.shape} for {num_rows} rows of features")
            if not ((scores >= 0) & (scores <= 1)).all():
                raise ConfigError(f"{where}: gtscore has values that are not between 0 and 1")
            starts = np.arange(num_rows) * _HISUM_SECONDS
            segments = np.stack([starts, starts + _HISUM_SECONDS, scores.astype(np.float64)], axis=1)
            features = FeatureFile(file, name, _HISUM_SECONDS)
            # A video may be longer than its rows cover; the rest is unlabelled.
            yield LabelEntry(where, name, segments, math.nan, num_rows * _HISUM_SECONDS, features)
