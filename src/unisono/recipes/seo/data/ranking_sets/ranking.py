"""Queries, pages and relevance judgements: the common representation of all ranking data sets.

Queries and pages are numbered from 0 in file order and read as streams; only a few bytes of each stay in memory.
`by_ids.py` and `by_texts.py` build a `Ranking` from files. A split contains only the queries that it judges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unisono.errors import ConfigError
from unisono.recipes.common.tree import one_line
from unisono.recipes.seo.data.lines import plain_suffix, read_start

FORMS = (
    "a BEIR folder (corpus.jsonl, queries.jsonl, qrels/train.tsv), an MS MARCO folder (collection.tsv, queries.tsv, "
    "qrels.tsv), or a .tsv, .csv or .jsonl file (query, positive, negative)"
)

Remark = Callable[[str], None]
Stream = Callable[[], Iterator[str]]


@dataclass(frozen=True)
class Judgements:
    """Judged pairs of query and page, sorted by query and then in file order."""

    queries: NDArray[np.int32]
    pages: NDArray[np.int32]
    grades: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.queries)


@dataclass(frozen=True)
class Ranking:
    """Queries and pages of one split."""

    num_queries: int
    num_pages: int
    positives: Judgements
    """Relevant pages, with grades above 0; every query has at least one."""
    hard: Judgements
    """Hard negatives: pages judged as not relevant."""
    page_files: tuple[Path, ...]
    query_files: tuple[Path, ...]
    """The files that pages and queries are read from, which determine the name of the token cache."""
    splits: tuple[str, ...] = ("train",)
    sections: NDArray[np.int32] | None = None
    """The section of each page [num_pages], if the data set has sections."""
    _queries: Stream = field(default=lambda: iter(()), repr=False)
    _pages: Stream = field(default=lambda: iter(()), repr=False)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of pages and queries, without duplicates."""
        return tuple(dict.fromkeys((*self.page_files, *self.query_files)))

    def queries(self) -> Iterator[tuple[int, str]]:
        """Yields the number and text of each query."""
        return _counted(self._queries(), self.num_queries, self.query_files)

    def pages(self) -> Iterator[tuple[int, str]]:
        """Yields the number and text of each page."""
        return _counted(self._pages(), self.num_pages, self.page_files)

    def has_split(self, name: str) -> bool:
        """Returns whether the data set has a split "train" or "test"."""
        return name in self.splits


def read_ranking(
    path: str | Path, split: str = "train", *, remark: Remark = lambda text: None, leave_out_bad: bool = False
) -> Ranking:
    """Reads and checks the queries and pages of a folder or a file.

    The split "test" may also be called dev or validation; a single file has only the split "train".
    """
    from unisono.recipes.seo.data.ranking_sets.beir import Beir
    from unisono.recipes.seo.data.ranking_sets.by_ids import ranking_by_ids
    from unisono.recipes.seo.data.ranking_sets.by_texts import ranking_by_texts, table_of
    from unisono.recipes.seo.data.ranking_sets.marco import Marco, has_ids

    place = Path(path).expanduser()
    if place.is_dir():
        if file := first_file(place, "corpus.jsonl"):
            return ranking_by_ids(Beir(place, file, split), remark, leave_out_bad)
        if file := first_file(place, "collection.tsv"):
            return ranking_by_ids(Marco(place, file, split), remark, leave_out_bad)
        splits = splits_in(place, lambda name: [f"{name}.jsonl", f"{name}.csv", f"{name}.tsv"])
        table = chosen_split(place, splits, split)
        return ranking_by_texts(table_of(table), tuple(splits), remark, leave_out_bad)
    if plain_suffix(place) not in (".csv", ".jsonl", ".tsv"):
        raise ConfigError(one_line(f"{place}: expected {FORMS}"))
    read_start(place, 1)
    collection = first_file(place.parent, "collection.tsv")
    if collection and plain_suffix(place) == ".tsv" and has_ids(place):
        return ranking_by_ids(Marco(place.parent, collection, split, judged=place), remark, leave_out_bad)
    return ranking_by_texts(table_of(place), ("train",), remark, leave_out_bad)


def first_file(folder: Path, *names: str) -> Path | None:
    """Returns the first of these files that exists in a folder, gzipped or not."""
    return next((folder / each for name in names for each in (name, f"{name}.gz") if (folder / each).is_file()), None)


def splits_in(folder: Path, names: Callable[[str], list[str]]) -> dict[str, Path]:
    """Returns the files in a folder that contain the splits "train" and "test"."""
    aliases = {"train": ("train",), "test": ("test", "dev.small", "dev", "validation", "valid", "val")}
    files = {
        split: first_file(folder, *(name for word in words for name in names(word))) for split, words in aliases.items()
    }
    return {split: file for split, file in files.items() if file is not None}


def chosen_split(folder: Path, splits: dict[str, Path], split: str) -> Path:
    """Returns the file of a split; raises ConfigError if the file does not exist."""
    if split in splits:
        return splits[split]
    if not splits:
        names = ", ".join(sorted(each.name for each in folder.iterdir())[:8])
        raise ConfigError(one_line(f"{folder} has {names or 'no files'}; expected {FORMS}"))
    existing = ", ".join(file.name for file in splits.values())
    raise ConfigError(one_line(f"{folder} has no {split} split, only {existing}; use other data"))


def judgements(
    queries: NDArray[np.int32], pages: NDArray[np.int32], grades: NDArray[np.float32], num_pages: int
) -> tuple[Judgements, Judgements]:
    """Returns relevant pages and hard negatives; duplicate pairs are merged and get their highest grade."""
    pairs = queries.astype(np.int64) * max(num_pages, 1) + pages
    # Sort by pair, then by descending grade, and keep the first entry of each pair.
    best = np.lexsort((np.arange(len(pairs)), -grades, pairs))
    once = np.ones(len(pairs), bool)
    once[1:] = pairs[best][1:] != pairs[best][:-1]
    chosen = np.sort(best[once])
    chosen = chosen[np.argsort(queries[chosen], kind="stable")]
    answers = grades[chosen] > 0
    return _of(chosen[answers], queries, pages, grades), _of(chosen[~answers], queries, pages, grades)


def _of(
    rows: NDArray[np.int64], queries: NDArray[np.int32], pages: NDArray[np.int32], grades: NDArray[np.float32]
) -> Judgements:
    return Judgements(queries[rows], pages[rows], grades[rows])


def _counted(texts: Iterator[str], expected: int, files: tuple[Path, ...]) -> Iterator[tuple[int, str]]:
    number = -1
    for number, text in enumerate(texts):
        yield number, text
    if number + 1 != expected:
        names = ", ".join(str(file) for file in files[:3])
        raise ConfigError(one_line(f"{names}: changed while it was being read; start again"))
