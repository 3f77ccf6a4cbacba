"""Reads labelled videos: the human scores for parts of each video, and the video's files.

`label_formats` parses the label files. Videos and feature files are next to the label file, or in `videos/` and
`features/` there; a name in a label file can only refer to files inside that folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unisono.config.values import shown
from unisono.errors import ConfigError
from unisono.recipes.clips.data.feature_files import FEATURES, FeatureFile
from unisono.recipes.clips.data.label_formats import COLUMNS, KINDS, LabelEntry, labels_in
from unisono.recipes.clips.video.clips import VIDEOS
from unisono.recipes.common.bad_files import BadMedia
from unisono.recipes.common.tree import Outside, Tree, one_line


@dataclass(frozen=True, eq=False)
class Labelled:
    """A video or its features, with the scores of its parts."""

    name: str
    """The path of the video in the folder; the same for all queries about a video."""
    video: Path | None
    features: FeatureFile | None
    duration: float | None
    """Duration in seconds; None if the label file does not contain it."""
    clip_seconds: float
    segments: NDArray[np.float64]
    """Start, end and score (0 to 1) of each part [n, 3], sorted and without overlaps; NaN means unlabelled."""
    rest: float = 0.0
    """The score of everything outside the segments; NaN means unlabelled."""
    where: str = ""
    query: str | None = None
    qid: int | str | None = None
    raters: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """QVHighlights only: clip index -> each annotator's score (0 to 4) of that 2 s clip."""

    def scores_for(
        self, num_clips: int, *, duration: float | None = None, cut_off: bool = False
    ) -> NDArray[np.float32]:
        """Returns the mean score (0 to 1) of each clip, [num_clips]; NaN if less than half of a clip is labelled.

        `duration` shortens the last clip. Raises an error if a label lies after the end of the video, unless the file
        is truncated (`cut_off`).
        """
        edges: NDArray[np.float64] = np.arange(num_clips + 1, dtype=np.float64) * self.clip_seconds
        if duration is not None and duration > edges[-2]:
            edges[-1] = min(edges[-1], duration)
        behind = self.segments[self.segments[:, 0] >= edges[-1] + self.clip_seconds]
        if len(behind) and not cut_off:
            raise ConfigError(
                f"{self.where}: {self.name} is {edges[-1]:g} s long, but a label covers {behind[0, 0]:g} to "
                f"{behind[0, 1]:g} s; correct or remove it (times must be in seconds)"
            )
        heights, lengths = self.segments[:, 2], np.diff(edges)
        unlabelled = np.isnan(heights)
        total = self._area(np.where(unlabelled, 0, heights), edges)
        if math.isnan(self.rest):
            labelled_seconds = self._area(np.where(unlabelled, 0.0, 1.0), edges)
        else:
            labelled_seconds = lengths - self._area(np.where(unlabelled, 1.0, 0.0), edges)
            total += self.rest * (lengths - self._area(np.ones(len(heights)), edges))
        enough = labelled_seconds >= 0.5 * lengths - 1e-6
        scores = np.full(num_clips, np.nan, np.float32)
        scores[enough] = (total[enough] / labelled_seconds[enough]).clip(0, 1)
        return scores

    def _area(self, heights: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
        """Integrates the segments' heights between consecutive edges, [len(edges) - 1]."""
        if not len(heights):
            return np.zeros(len(edges) - 1)
        areas = heights * (self.segments[:, 1] - self.segments[:, 0])
        after = np.cumsum(areas)
        times, summed = self.segments[:, :2].reshape(-1), np.stack([after - areas, after], axis=1).reshape(-1)
        last = np.append(np.diff(times) > 0, True)  # removes duplicate times: a segment may start where another ends
        return np.asarray(np.diff(np.interp(edges, times[last], summed[last])))


def read_labels(
    path: Path,
    clip_seconds: float,
    *,
    media: Path | None = None,
    highest_score: float = 1.0,
    feature_seconds: float | None = None,
    leave_out_bad: bool = False,
    follow_links: bool = False,
    remark: Callable[[str], object] = lambda text: None,
) -> list[Labelled]:
    """Reads the labelled videos of a folder or of a label file, always in the same order.

    `media` is the folder with the videos and feature files, if they are not next to the labels. Scores in a CSV file
    range from 0 to `highest_score`. A row of a feature file covers `feature_seconds`, by default one clip. A label
    without a video raises an error; with `leave_out_bad`, it is skipped, and `remark` is called with a note. A symbolic
    link that points outside the folder raises an error unless `follow_links` is set.
    """
    if not 0 < clip_seconds < math.inf or not 0 < highest_score < math.inf:
        raise ConfigError(f"clip_seconds {clip_seconds}, highest_score {highest_score}: both must be above 0")
    try:
        labels = _labels_file(path)
        files = _Files(Tree(media or labels.parent, follow_links=follow_links), feature_seconds)
        groups: dict[tuple[str, str], list[tuple[_Media, LabelEntry]]] = {}
        for entry in labels_in(labels, highest_score):
            media_files = _Media(entry.name, None, entry.features) if entry.features else files.find(entry)
            if media_files is not None:  # CSV lines about one video are merged; each QVHighlights query is a sample
                query = "" if labels.suffix.lower() == ".csv" else entry.where
                groups.setdefault((media_files.name, query), []).append((media_files, entry))
        missing = files.check_missing(labels, bool(groups), leave_out_bad)
        labelled = [_merged(entries, clip_seconds) for entries in groups.values()]
    except (ConfigError, BadMedia) as error:
        raise ConfigError(one_line(str(error))) from None
    if missing:
        remark(one_line(missing))
    return labelled


@dataclass(frozen=True)
class _Media:
    """The files of one video."""

    name: str
    video: Path | None
    features: FeatureFile | None


def _merged(entries: list[tuple[_Media, LabelEntry]], clip_seconds: float) -> Labelled:
    """Merges all label entries of one video."""
    rows = sorted((tuple(segment), entry.where) for _, entry in entries for segment in entry.segments.tolist())
    for (before, there), (after, here) in pairwise(rows):
        if after[0] < before[1] - 1e-6:
            raise ConfigError(
                f"{here}: {after[0]:g} to {after[1]:g} s overlaps {before[0]:g} to {before[1]:g} s "
                f"({there.rpartition(', ')[2]}); a moment can have only one score: shorten or remove one of them"
            )
    files, first = entries[0]
    return Labelled(
        files.name,
        files.video,
        files.features,
        first.duration,
        clip_seconds,
        np.array([segment for segment, _ in rows], dtype=np.float64).reshape(-1, 3),
        first.rest,
        first.where,
        first.query,
        first.qid,
        first.raters,
    )


def _labels_file(path: Path) -> Path:
    if path.is_file() and path.suffix.lower() in KINDS:
        return path
    if not path.is_dir():
        raise ConfigError(f"{path}: expected a folder with labels.csv, or a label file ({' '.join(KINDS)})")
    for name in ("labels.csv", "labels.jsonl"):
        if (path / name).is_file():
            return path / name
    candidates = sorted(each for each in path.iterdir() if each.suffix.lower() in KINDS and each.is_file())
    if len(candidates) == 1:
        return candidates[0]
    names = ", ".join(each.name for each in candidates[:3])
    advice = (
        f"it contains {names}: pass the file to use"
        if candidates
        else f"expected a CSV file with the columns {','.join(COLUMNS)}"
    )
    raise ConfigError(f"{path} contains no labels.csv; {advice}")


class _Files:
    """The videos and feature files of a folder, looked up by the names in a label file."""

    def __init__(self, tree: Tree, feature_seconds: float | None) -> None:
        self._tree, self._seconds = tree, feature_seconds
        self._media: dict[str, _Media | None] = {}
        self._missing: dict[str, str] = {}

    def find(self, entry: LabelEntry) -> _Media | None:
        """Returns the files that a label refers to; None if there are none."""
        if entry.name not in self._media:
            try:
                self._media[entry.name] = self._look_up(entry.name)
            except Outside as outside:
                remedy = ", or pass --follow_links" if outside.is_link else ""
                raise ConfigError(f"{entry.where}: {outside}{remedy}") from None
        if self._media[entry.name] is None:
            self._missing.setdefault(entry.name, entry.where)
        return self._media[entry.name]

    def _look_up(self, name: str) -> _Media | None:
        inside, path = self._tree.relative(name), self._tree.path
        video, features = self._first(inside, "videos", VIDEOS), self._first(inside, "features", FEATURES)
        if video is None and features is None:
            return None
        rows = FeatureFile(path(features), seconds=self._seconds) if features else None
        return _Media(video or features or inside, path(video) if video else None, rows)

    def _first(self, name: str, folder: str, suffixes: tuple[str, ...]) -> str | None:
        # Does not use Path.suffix, because names may contain dots: names in QVHighlights end in .0
        suffix_of_name = next((end for end in (*VIDEOS, *FEATURES) if name.lower().endswith(end)), "")
        names = [name] if suffix_of_name and suffix_of_name in suffixes else []
        names += [name[: len(name) - len(suffix_of_name)] + suffix for suffix in suffixes]
        return next((each for each in [*names, *(f"{folder}/{each}" for each in names)] if each in self._tree), None)

    def check_missing(self, labels: Path, any_exists: bool, leave_out_bad: bool) -> str:
        """Raises ConfigError if the files of a label do not exist; if such labels are skipped, returns a remark."""
        if not self._missing:
            if not any_exists:
                raise ConfigError(f"{labels} contains no labels; expected {','.join(COLUMNS)} or a line per query")
            return ""
        name, where = next(iter(self._missing.items()))
        others = f" (and none for {len(self._missing) - 1} others)" if len(self._missing) > 1 else ""
        if any_exists and leave_out_bad:
            return f"skipped the labels of {len(self._missing)} videos that do not exist: {shown(name)} ({where})"
        raise ConfigError(
            f"{where}: there is no video and no feature file {shown(name)}{others} in {self._tree.folder}; add it"
            + (", or skip it with --leave_out_bad" if any_exists else "")
        )
