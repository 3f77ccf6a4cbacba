"""What people have said about videos: which parts of them are worth how much, and where the videos are.

`label_formats` says how labels are written. The files lie beside the labels, or in `videos/` and `features/` there;
what a label names is looked for in that folder and never outside it.
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
from unisono.recipes.clips.feature_files import FEATURES, FeatureFile
from unisono.recipes.clips.label_formats import COLUMNS, KINDS, Said, labels_in
from unisono.recipes.clips.video import VIDEOS
from unisono.recipes.common.bad_files import BadMedia
from unisono.recipes.common.tree import Outside, Tree, one_line


@dataclass(frozen=True, eq=False)
class Labelled:
    """A video, or its features, and what was said about its parts."""

    name: str
    """Its path in the folder; the same for each query about a video."""
    video: Path | None
    features: FeatureFile | None
    duration: float | None
    """Seconds, where the labels say it."""
    clip_seconds: float
    segments: NDArray[np.float64]
    """[n, 3] start, end and score of 0 to 1, in order and without overlaps; a score of NaN: nobody looked there."""
    rest: float = 0.0
    """The score of what no segment covers; NaN: nobody looked."""
    where: str = ""
    query: str | None = None
    qid: int | str | None = None
    raters: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """QVHighlights: what each person gave to a clip of 2 s, from 0 to 4."""

    def scores_for(
        self, num_clips: int, *, duration: float | None = None, cut_off: bool = False
    ) -> NDArray[np.float32]:
        """[num_clips] scores of 0 to 1: the mean over each clip; NaN where less than half of it was looked at.

        `duration` shortens the last clip. Labels behind the end are a mistake, unless the video is cut off.
        """
        edges: NDArray[np.float64] = np.arange(num_clips + 1, dtype=np.float64) * self.clip_seconds
        if duration is not None and duration > edges[-2]:
            edges[-1] = min(edges[-1], duration)
        behind = self.segments[self.segments[:, 0] >= edges[-1] + self.clip_seconds]
        if len(behind) and not cut_off:
            raise ConfigError(
                f"{self.where}: {self.name} is {edges[-1]:g} s long, and a label says {behind[0, 0]:g} to "
                f"{behind[0, 1]:g} s; correct it, or remove it (are these seconds?)"
            )
        heights, lengths = self.segments[:, 2], np.diff(edges)
        unseen = np.isnan(heights)
        total = self._area(np.where(unseen, 0, heights), edges)
        if math.isnan(self.rest):
            known = self._area(np.where(unseen, 0.0, 1.0), edges)
        else:
            known = lengths - self._area(np.where(unseen, 1.0, 0.0), edges)
            total += self.rest * (lengths - self._area(np.ones(len(heights)), edges))
        enough = known >= 0.5 * lengths - 1e-6
        scores = np.full(num_clips, np.nan, np.float32)
        scores[enough] = (total[enough] / known[enough]).clip(0, 1)
        return scores

    def _area(self, heights: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
        """[len(edges) - 1] the area under the segments, so high, between each two edges."""
        if not len(heights):
            return np.zeros(len(edges) - 1)
        areas = heights * (self.segments[:, 1] - self.segments[:, 0])
        after = np.cumsum(areas)
        times, summed = self.segments[:, :2].reshape(-1), np.stack([after - areas, after], axis=1).reshape(-1)
        last = np.append(np.diff(times) > 0, True)  # of times that are equal, where one begins as another ends
        return np.asarray(np.diff(np.interp(edges, times[last], summed[last])))


def read_labels(
    path: Path,
    clip_seconds: float,
    *,
    media: Path | None = None,
    highest_score: float = 1.0,
    feature_seconds: float | None = None,
    leave_out_bad: bool = False,
    said: Callable[[str], None] = lambda text: None,
) -> list[Labelled]:
    """The labelled videos of a folder, or of a file of labels, always in the same order.

    `media` is the folder of the videos and features, where it is not that of the labels. Scores of a CSV go from 0 to
    `highest_score`. A row of a feature file is a clip, or `feature_seconds` long. Labels for a video that is not there
    are an error, or left out with `leave_out_bad`; `said` is told that.
    """
    if not 0 < clip_seconds < math.inf or not 0 < highest_score < math.inf:
        raise ConfigError(f"clip_seconds {clip_seconds}, highest_score {highest_score}: both must be above 0")
    try:
        labels = _labels_file(path)
        files = _Files(Tree(media or labels.parent), feature_seconds)
        together: dict[tuple[str, str], list[tuple[_Found, Said]]] = {}
        for line in labels_in(labels, highest_score):
            found = _Found(line.name, None, line.features) if line.features else files.find(line)
            if found is not None:  # lines of a CSV about one video belong together; queries are each for themselves
                alone = "" if labels.suffix.lower() == ".csv" else line.where
                together.setdefault((found.name, alone), []).append((found, line))
        remark = files.judged(labels, bool(together), leave_out_bad)
        labelled = [_joined(lines, clip_seconds) for lines in together.values()]
    except (ConfigError, BadMedia) as error:
        raise ConfigError(one_line(str(error))) from None
    if remark:
        said(one_line(remark))
    return labelled


@dataclass(frozen=True)
class _Found:
    name: str
    video: Path | None
    features: FeatureFile | None


def _joined(lines: list[tuple[_Found, Said]], clip_seconds: float) -> Labelled:
    """What several lines say about one video."""
    rows = sorted((tuple(segment), said.where) for _, said in lines for segment in said.segments.tolist())
    for (before, there), (after, here) in pairwise(rows):
        if after[0] < before[1] - 1e-6:
            raise ConfigError(
                f"{here}: {after[0]:g} to {after[1]:g} s overlaps {before[0]:g} to {before[1]:g} s "
                f"({there.rpartition(', ')[2]}); a moment has one score: cut or remove one of them"
            )
    found, first = lines[0]
    return Labelled(
        found.name,
        found.video,
        found.features,
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
        raise ConfigError(f"{path}: expected a folder with labels.csv, or a file of labels ({' '.join(KINDS)})")
    for name in ("labels.csv", "labels.jsonl"):
        if (path / name).is_file():
            return path / name
    several = sorted(each for each in path.iterdir() if each.suffix.lower() in KINDS and each.is_file())
    if len(several) == 1:
        return several[0]
    names = ", ".join(each.name for each in several[:3])
    told = f"it has {names}: give the one to use" if several else f"expected one with {','.join(COLUMNS)}"
    raise ConfigError(f"{path}: no labels.csv in it; {told}")


class _Files:
    """The videos and feature files of a folder, by the names that labels call them."""

    def __init__(self, tree: Tree, feature_seconds: float | None) -> None:
        self._tree, self._seconds = tree, feature_seconds
        self._known: dict[str, _Found | None] = {}
        self._missing: dict[str, str] = {}

    def find(self, said: Said) -> _Found | None:
        """The files that a label is about; None if there are none."""
        if said.name not in self._known:
            try:
                self._known[said.name] = self._look(said.name)
            except Outside as outside:
                raise ConfigError(f"{said.where}: {outside}") from None
        if self._known[said.name] is None:
            self._missing.setdefault(said.name, said.where)
        return self._known[said.name]

    def _look(self, name: str) -> _Found | None:
        inside, path = self._tree.relative(name), self._tree.path
        video, features = self._first(inside, "videos", VIDEOS), self._first(inside, "features", FEATURES)
        if video is None and features is None:
            return None
        rows = FeatureFile(path(features), seconds=self._seconds) if features else None
        return _Found(video or features or inside, path(video) if video else None, rows)

    def _first(self, name: str, folder: str, suffixes: tuple[str, ...]) -> str | None:
        # Names may have dots: those of QVHighlights end with .0
        known = next((end for end in (*VIDEOS, *FEATURES) if name.lower().endswith(end)), "")
        names = [name] if known and known in suffixes else []
        names += [name[: len(name) - len(known)] + suffix for suffix in suffixes]
        return next((each for each in [*names, *(f"{folder}/{each}" for each in names)] if each in self._tree), None)

    def judged(self, labels: Path, any_found: bool, leave_out_bad: bool) -> str:
        """Refuses labels for files that are not there, or says that they are left out."""
        if not self._missing:
            if not any_found:
                raise ConfigError(f"{labels}: there is not one label in it")
            return ""
        name, where = next(iter(self._missing.items()))
        others = f" (and none for {len(self._missing) - 1} others)" if len(self._missing) > 1 else ""
        if any_found and leave_out_bad:
            return f"labels of {len(self._missing)} videos that are not there are left out: {shown(name)} ({where})"
        raise ConfigError(
            f"{where}: there is no video and no feature file {shown(name)}{others} in {self._tree.folder}; put it there"
            + (", or go on without it by --leave_out_bad" if any_found else "")
        )
