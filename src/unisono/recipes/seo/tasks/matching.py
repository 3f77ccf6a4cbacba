"""Relevance judgements as arrays of query and page numbers, for training and evaluation.

One process writes the arrays, and all processes memory-map them, so a large data set takes little memory per process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import ConfigError
from unisono.recipes.common.cache_files import write_cache_file
from unisono.recipes.seo.data.ranking_sets.ranking import Ranking

_MAX_EVAL, _ONE_IN = 1000, 20
_MAX_EVAL_OF_FEW, _ONE_IN_OF_FEW = 50, 5
_MIN_EVAL = 30
Numbers = NDArray[np.int32]


@dataclass(frozen=True)
class Matching:
    """The judgements of one split."""

    queries: Numbers  # query numbers in the data set
    starts: NDArray[np.int64]  # where the pages of each query start in `relevant`
    relevant: Numbers
    grades: NDArray[np.float32]
    negative_starts: NDArray[np.int64]
    negatives: Numbers
    candidates: Numbers  # pages to rank in an evaluation

    def judged(self) -> dict[int, dict[int, float]]:
        """Returns a mapping: query number -> page number -> grade."""
        return {
            query: dict(zip(self.relevant[a:b].tolist(), self.grades[a:b].tolist(), strict=True))
            for query, (a, b) in enumerate(zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True))
        }

    def relevant_for(self, query: int) -> Numbers:
        """Returns the relevant pages of a query."""
        return self.relevant[self.starts[query] : self.starts[query + 1]]

    def negatives_of(self, query: int) -> Numbers:
        """Returns the hard negatives of a query."""
        return self.negatives[self.negative_starts[query] : self.negative_starts[query + 1]]


_FIELDS = tuple(Matching.__dataclass_fields__)


def save(folder: Path, side: str, matching: Matching) -> None:
    """Writes the arrays of a split."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FIELDS:
        buffer = BytesIO()
        np.save(buffer, getattr(matching, name), allow_pickle=False)
        write_cache_file(folder / f"{side}.{name}.npy", buffer.getvalue())


def load(folder: Path, side: str) -> Matching:
    """Memory-maps the arrays of a split."""
    arrays: dict[str, Any] = {}
    for name in _FIELDS:
        file = folder / f"{side}.{name}.npy"
        small = file.stat().st_size < 4096  # read small files, because an empty array cannot be memory-mapped
        arrays[name] = np.load(file, mmap_mode=None if small else "r", allow_pickle=False)
    return Matching(**arrays)


def match(data: Ranking) -> Matching:
    """Returns the judgements of all queries of a data set, with all pages as candidates."""
    queries = np.arange(data.num_queries + 1)
    return Matching(
        np.arange(data.num_queries, dtype=np.int32),
        np.searchsorted(data.positives.queries, queries).astype(np.int64),
        data.positives.pages,
        data.positives.grades,
        np.searchsorted(data.hard.queries, queries).astype(np.int64),
        data.hard.pages,
        np.arange(data.num_pages, dtype=np.int32),
    )


def hold_out(
    whole: Matching, num_eval: int | None, num_candidates: int | None, what: str, among: NDArray[np.bool_] | None = None
) -> tuple[Matching, Matching]:
    """Returns the judgements for training, and the judgements of held-out queries, which are evenly spaced.

    The candidates of held-out queries are their relevant pages and other evenly spaced ones. `among` selects the
    queries that may be held out.
    """
    total = len(whole.queries)
    number = default_num_eval(total) if num_eval is None else num_eval
    if number >= total:
        raise ConfigError(f"num_eval {number}: {what} has {total} queries; some must remain for training")
    eligible = np.arange(total) if among is None else np.flatnonzero(among)
    number = min(number, len(eligible))
    chosen = eligible[[(2 * place + 1) * len(eligible) // (2 * number) for place in range(number)]].astype(np.int64)
    rest = np.setdiff1d(np.arange(total), chosen)
    held_out = _part(whole, chosen)
    return _part(whole, rest), with_candidates(held_out, number if num_candidates is None else num_candidates)


def default_num_eval(total: int) -> int:
    """Returns the default number of samples to hold out: 5 %, at most 1,000; for small data sets 20 %, at most 50."""
    return min(_MAX_EVAL, max(total // _ONE_IN, min(_MAX_EVAL_OF_FEW, total // _ONE_IN_OF_FEW)))


def few_held_out_remarks(number: int, kind: str) -> list[str]:
    """Returns a remark if too few samples are held out for reliable metrics."""
    if number >= _MIN_EVAL:
        return []
    held_out = f"only {number} {kind} are held out" if number else f"no {kind} are held out"
    problem = "so the metrics are rough" if number else "so nothing is evaluated"
    return [f"{held_out}, {problem}; use more with --num_eval or --eval_data_path"]


def with_candidates(matching: Matching, number: int | None) -> Matching:
    """Limits the candidates to this many pages: the relevant pages, and other evenly spaced pages. None: all pages."""
    everything = matching.candidates
    if number is None or number >= len(everything):
        return matching
    relevant = np.unique(matching.relevant)
    others = np.setdiff1d(everything, relevant)
    more = max(0, number - len(relevant))
    places = (2 * np.arange(more) + 1) * len(others) // (2 * max(1, more))
    candidates = np.sort(np.concatenate([relevant, others[places]])).astype(np.int32)
    return Matching(**{**vars(matching), "candidates": candidates})


def without(matching: Matching, texts: NDArray[np.uint64], others: NDArray[np.uint64]) -> Matching:
    """Removes the queries whose hash is in `others`; `texts` are the text hashes of all queries of the data set."""
    left = np.flatnonzero(~np.isin(texts[matching.queries], others))
    return matching if len(left) == len(matching.queries) else _part(matching, left)


def _part(whole: Matching, chosen: NDArray[np.int64]) -> Matching:
    """Returns some of the queries with their judgements."""
    relevant, starts = _taken(whole.starts, chosen)
    negatives, negative_starts = _taken(whole.negative_starts, chosen)
    return Matching(
        whole.queries[chosen],
        starts,
        whole.relevant[relevant],
        whole.grades[relevant],
        negative_starts,
        whole.negatives[negatives],
        whole.candidates,
    )


def _taken(starts: NDArray[np.int64], chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the positions of the chosen lists' entries in a flattened list of lists, and each list's new start."""
    sizes = starts[chosen + 1] - starts[chosen]
    new = _starts(sizes.tolist())
    places = np.repeat(starts[chosen] - new[:-1], sizes) + np.arange(int(new[-1]))
    return places, new


def _starts(sizes: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))]).astype(np.int64)
