"""Ranking data sets as tables: each row has a query, relevant pages and negatives.

Such tables repeat texts: a query may have several rows, and a page may be relevant for one query and a negative for
another. Equal texts are treated as the same query or page.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.seo.data.bad_rows import BadRows
from unisono.recipes.seo.data.lines import lines_of, plain_suffix
from unisono.recipes.seo.data.ranking_sets.ids import Hashes, Ids
from unisono.recipes.seo.data.ranking_sets.ranking import Ranking, Remark, judgements
from unisono.recipes.seo.data.tables import no_text, rows_of, text_in

QUERY = ("query", "anchor", "question")
POSITIVE = ("positive", "pos", "positives", "page", "passage", "document", "answer")
_NEGATIVE = "neg"  # negative, negative_1, negatives, neg


class Example(NamedTuple):
    """One row of a table: a query, relevant pages and negatives."""

    query: str
    positives: list[str]
    negatives: list[str]


class Examples(Protocol):
    """An iterable of rows that can be read more than once."""

    @property
    def path(self) -> Path: ...

    def rows(self, bad: BadRows) -> Iterator[Example]:
        """Yields the usable rows; the others are added to `bad`."""


def table_of(path: Path) -> Examples:
    """Returns the rows of a file."""
    return Triples(path) if plain_suffix(path) == ".tsv" else Table(path)


@dataclass(frozen=True)
class Table:
    """A .csv or .jsonl; in .jsonl a column may hold a list."""

    path: Path

    def rows(self, bad: BadRows) -> Iterator[Example]:
        """Yields the usable rows."""
        for row in rows_of(self.path, (QUERY, POSITIVE), bad):
            query, positives = text_in(row.first(QUERY)), _texts(row.first(POSITIVE))
            negatives = [
                text
                for name, value in row.fields.items()
                if name.startswith(_NEGATIVE) and value not in (None, "")  # some rows have fewer negatives
                for text in _texts(value)
            ]
            if query is None:
                bad.add(row.where, f"its query {no_text(row.first(QUERY))}")
            elif not positives:
                bad.add(row.where, "a query without positives")
            elif None in positives or None in negatives:
                bad.add(row.where, f"a {'positive' if None in positives else 'negative'} is empty or not text")
            else:
                yield Example(query, [text for text in positives if text], [text for text in negatives if text])


@dataclass(frozen=True)
class Triples:
    """MS MARCO triples: tab-separated lines of query, positive and any number of negatives."""

    path: Path

    def rows(self, bad: BadRows) -> Iterator[Example]:
        """Yields the usable rows."""
        for number, line in lines_of(self.path):
            if not line.strip():
                continue
            fields = [text_in(field) for field in line.rstrip("\r\n").split("\t")]
            if number == 1 and [(field or "").lower() for field in fields[:2]] in (
                [q, p] for q in QUERY for p in POSITIVE
            ):
                continue  # a header
            texts = [field for field in fields if field]
            if len(fields) < 2:
                bad.add(f"{self.path}, line {number}", "no tab; expected query, positive and negative")
            elif len(texts) < len(fields):
                lacking = ("query", "positive", "negative")[min(fields.index(None), 2)]
                bad.add(f"{self.path}, line {number}", f"its {lacking} is empty")
            else:
                yield Example(texts[0], texts[1:2], texts[2:])


def ranking_by_texts(source: Examples, splits: tuple[str, ...], remark: Remark, leave_out_bad: bool = False) -> Ranking:
    """Builds a ranking data set from all rows."""
    bad = BadRows(leave_out_bad)
    queries, pages, answers = Hashes(), Hashes(), array("b")
    owners = array("i")  # the row of each page text, including repeated texts
    for number, row in enumerate(source.rows(bad)):
        queries.add(row.query)
        for texts, grade in ((row.positives, 1), (row.negatives, 0)):
            for text in texts:
                pages.add(text)
                answers.append(grade)
                owners.append(number)
    bad.report(remark, len(queries), "row", source.path)
    query_ids, page_ids = Ids(queries.array()), Ids(pages.array())
    of_query = query_ids.find(queries.array())[np.frombuffer(owners, np.int32)]
    grades = np.frombuffer(answers, np.int8).astype(np.float32)
    positives, hard = judgements(of_query, page_ids.find(pages.array()), grades, len(page_ids))

    def stream(texts: Callable[[Example], list[str]], first: NDArray[np.bool_]) -> Iterator[str]:
        place = 0
        for row in source.rows(BadRows(True)):
            for text in texts(row):
                if place < len(first) and first[place]:
                    yield text
                place += 1

    return Ranking(
        len(query_ids),
        len(page_ids),
        positives,
        hard,
        (source.path,),
        (source.path,),
        splits,
        _queries=lambda: stream(lambda row: [row.query], query_ids.first),
        _pages=lambda: stream(lambda row: [*row.positives, *row.negatives], page_ids.first),
    )


def _texts(value: Any) -> list[str | None]:
    return [text_in(each) for each in value] if isinstance(value, list) else [] if not value else [text_in(value)]
