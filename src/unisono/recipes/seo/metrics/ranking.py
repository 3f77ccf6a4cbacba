"""Ranking metrics: MRR, NDCG and recall. Pages may be scored in any order and on any rank.

Only the best pages of each query stay in memory, so a million pages need no more memory than a thousand, and merging
the best pages of all ranks gives the best pages overall. The definitions follow BEIR (trec_eval): a grade above 0 means
relevant, the gain in NDCG is the grade (not 2^grade - 1), the ideal order is the best order of all judged pages, and
the mean is over the queries that have a relevant page. A relevant page that is not among the stored pages counts as
missed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

CUT = 10
RECALLS = (1, 10, 100)
_EMPTY = torch.iinfo(torch.int64).min
_LOW = 0xFFFFFFFF
# Ties (of a collapsed model, or in 16 bit) must not be broken by page number, because relevant pages that come first in
# the file would then come first in the ranking. They are broken by a permutation of the page numbers that differs
# between queries: the number times an odd constant modulo 2^32, plus an offset that depends on the query.
_SCRAMBLE, _SHIFT = 0x9E3779B1, 0x85EBCA77
_UNSCRAMBLE = pow(_SCRAMBLE, -1, 2**32)


class TopPages:
    """Collects the best pages of each query and computes the metrics; merging the objects of all ranks is exact.

    The metrics do not depend on the order in which scores are added, or on how they are divided into calls. Scores are
    compared in float32; a page with a NaN score is ignored.
    """

    update_called = False
    sync_on_compute = False  # the engine calls merge_state

    def __init__(self, judged: Mapping[int, Mapping[int, float]], num_queries: int, keep: int = 100) -> None:
        triples = [
            (query, page, grade) for query in sorted(judged) for page, grade in judged[query].items() if grade > 0
        ]
        self._keep = keep
        self._judged = torch.tensor([triple[:2] for triple in triples], dtype=torch.int64).reshape(-1, 2)
        self._grades = torch.tensor([triple[2] for triple in triples], dtype=torch.float64)
        # The high bits contain the score and the low bits a tie-breaker, so all keys differ and topk is deterministic.
        self._best = torch.full((num_queries, keep), _EMPTY, dtype=torch.int64)

    def update(self, scores: Tensor, page_numbers: Tensor, queries: Tensor | None = None) -> None:
        """Adds scores [Q, P] of pages [P], or of pages [Q, P] that differ from query to query.

        Row i belongs to query i, or to queries[i], which may contain duplicates. Add each pair of query and page once.
        """
        self.update_called = True
        everyone = queries is None
        rows = torch.arange(len(self._best), device=self._best.device) if queries is None else queries
        rows = rows.to(self._best.device, torch.int64)
        keys = _keys(scores.detach().to(self._best.device), page_numbers.to(self._best.device), rows)
        if not everyone:
            rows, keys = _by_query(rows, keys)
        if keys.shape[1] > self._keep:
            keys = keys.topk(self._keep).values
        best = self._best if everyone else self._best[rows]
        best = torch.cat([best, keys], dim=1).topk(self._keep).values
        self._best = best if everyone else self._best.index_copy(0, rows, best)

    def merge_state(self, other: Self) -> None:
        """Adds the best pages of another rank."""
        self.update_called |= other.update_called
        both = torch.cat([self._best, other._best.to(self._best.device)], dim=1)
        self._best = both.topk(self._keep).values

    def reset(self) -> None:
        """Removes all pages."""
        self._best = torch.full_like(self._best, _EMPTY)
        self.update_called = False

    def to(self, device: torch.device | str) -> Self:
        """Moves the collected pages to a device."""
        self._best = self._best.to(device)
        return self

    def cpu(self) -> Self:
        """Moves the collected pages to the CPU."""
        return self.to("cpu")

    def pages(self) -> Tensor:
        """Returns the numbers of the best pages [num_queries, keep], best first, padded with -1."""
        rows = torch.arange(len(self._best), device=self._best.device)[:, None]
        numbers = (((self._best & _LOW) - rows * _SHIFT) * _UNSCRAMBLE) & _LOW
        return torch.where(self._best == _EMPTY, -1, numbers)

    def compute(self) -> dict[str, float]:
        """Returns MRR@10, NDCG@10, Recall@1, @10 and @100, except cut-offs larger than `keep`."""
        return measures(self.pages().cpu(), self._judged, self._grades)


def measures(pages: Tensor, judged: Tensor, grades: Tensor) -> dict[str, float]:
    """Returns the metrics of ranked pages [Q, K], given relevant (query, page) pairs [N, 2] and their grades [N].

    Missing pages are -1.
    """
    num_queries, depth = pages.shape
    gains = _gains(pages, judged, grades)  # [Q, K]
    relevant = torch.bincount(judged[:, 0], minlength=num_queries)
    has_relevant = relevant > 0
    if not bool(has_relevant.any()):
        return {}
    is_relevant = gains > 0
    places = torch.arange(1, depth + 1, dtype=torch.float64)
    of_each: dict[str, Tensor] = {}
    if depth >= CUT:
        of_each[f"MRR@{CUT}"] = (is_relevant[:, :CUT] / places[:CUT]).amax(dim=1)
        discounts = 1 / torch.log2(places[:CUT] + 1)
        of_each[f"NDCG@{CUT}"] = gains[:, :CUT] @ discounts / _ideal(judged, grades, num_queries).clamp(min=1e-300)
    for cut in RECALLS:
        if depth >= cut:
            of_each[f"Recall@{cut}"] = is_relevant[:, :cut].sum(dim=1) / relevant.double()
    return {name: float(values[has_relevant].mean()) for name, values in of_each.items()}


def _gains(pages: Tensor, judged: Tensor, grades: Tensor) -> Tensor:
    """Returns the grade of each ranked page [Q, K]; 0 for pages without a judgement."""
    judged_pairs, order = ((judged[:, 0] << 32) | judged[:, 1]).sort()
    rows = torch.arange(len(pages))[:, None]
    ranked_pairs = torch.where(pages < 0, -1, (rows << 32) | pages)
    place = torch.searchsorted(judged_pairs, ranked_pairs).clamp(max=len(judged_pairs) - 1)
    return (
        torch.where(judged_pairs[place] == ranked_pairs, grades[order][place], 0.0)
        if len(judged_pairs)
        else torch.zeros(pages.shape)
    )


def _ideal(judged: Tensor, grades: Tensor, num_queries: int) -> Tensor:
    """Returns the ideal DCG [Q], which is the DCG of the judged pages in their best order."""
    best_first = grades.argsort(descending=True, stable=True)
    order = best_first[judged[best_first, 0].argsort(stable=True)]  # sorted by query, then by grade, best first
    queries = judged[order, 0]
    place = torch.arange(len(order)) - torch.searchsorted(queries, queries)  # 0 for the best page of a query
    discounted = torch.where(place < CUT, grades[order] / torch.log2(place + 2.0), 0.0)
    return torch.zeros(num_queries, dtype=torch.float64).index_add(0, queries, discounted)


def _keys(scores: Tensor, pages: Tensor, rows: Tensor) -> Tensor:
    """Returns int64 keys [Q, P] that sort by score, then by permuted page number."""
    scores = scores.float() + 0.0  # -0 is 0
    bits = scores.view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # these integers sort like the floats
    keys <<= 32
    ties = (pages.long() * _SCRAMBLE & _LOW) + (rows * _SHIFT & _LOW)[:, None]
    keys |= ties.bitwise_and_(_LOW)
    return keys.masked_fill_(scores.isnan(), _EMPTY)


def _by_query(rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Merges the rows of each query into one row of keys."""
    order = rows.argsort(stable=True)
    queries, group, counts = torch.unique_consecutive(rows[order], return_inverse=True, return_counts=True)
    if len(queries) == len(rows):
        return queries, keys[order]
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[group]
    wide = keys.new_full((len(queries), int(counts.max()), keys.shape[1]), _EMPTY)
    wide[group, place] = keys[order]
    return queries, wide.flatten(1)
