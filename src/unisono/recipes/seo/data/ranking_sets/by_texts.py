"""Rankings of tables in which each row has a query, a page that answers it and others that do not.

Such tables repeat their texts: a query stands in many rows, a page is one query's answer and another's negative. Equal
texts are one query or one page here.
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
    """One row."""

    query: str
    positives: list[str]
    negatives: list[str]


class Examples(Protocol):
    """Where rows come from; they can be read more than once."""

    @property
    def path(self) -> Path: ...

    def rows(self, bad: BadRows, remark: Remark) -> Iterator[Example]:
        """The rows that can be used; the others are told to `bad`."""


def table_of(path: Path) -> Examples:
    """The rows of a file."""
    return Triples(path) if plain_suffix(path) == ".tsv" else Table(path)


@dataclass(frozen=True)
class Table:
    """A .csv or .jsonl with columns for them; in .jsonl a column may hold a list."""

    path: Path

    def rows(self, bad: BadRows, remark: Remark) -> Iterator[Example]:
        """The rows that can be used."""
        for row in rows_of(self.path, (QUERY, POSITIVE), bad, remark):
            query, positives = text_in(row.first(QUERY)), _texts(row.first(POSITIVE))
            negatives = [
                text
                for name, value in row.fields.items()
                if name.startswith(_NEGATIVE) and value not in (None, "")  # rows may have fewer of them than others
                for text in _texts(value)
            ]
            if query is None:
                bad.add(row.where, f"its query {no_text(row.first(QUERY))}")
            elif not positives:
                bad.add(row.where, "a query without positives: there is no page that answers it")
            elif None in positives or None in negatives:
                bad.add(row.where, f"a {'positive' if None in positives else 'negative'} of it is empty, or not text")
            else:
                yield Example(query, [text for text in positives if text], [text for text in negatives if text])


@dataclass(frozen=True)
class Triples:
    """MS MARCO's triples: lines of query, positive and negative (or none, or several), separated by tabs."""

    path: Path

    def rows(self, bad: BadRows, remark: Remark) -> Iterator[Example]:
        """The rows that can be used."""
        for number, line in lines_of(self.path, remark):
            if not line.strip():
                continue
            fields = [text_in(field) for field in line.rstrip("\r\n").split("\t")]
            if number == 1 and [(field or "").lower() for field in fields[:2]] in (
                [q, p] for q in QUERY for p in POSITIVE
            ):
                continue  # names of columns
            texts = [field for field in fields if field]
            if len(fields) < 2:
                bad.add(f"{self.path}, line {number}", "no tab in it; expected query, positive and negative")
            elif len(texts) < len(fields):
                lacking = ("query", "positive", "negative")[min(fields.index(None), 2)]
                bad.add(f"{self.path}, line {number}", f"its {lacking} is empty")
            else:
                yield Example(texts[0], texts[1:2], texts[2:])


def ranking_by_texts(source: Examples, splits: tuple[str, ...], remark: Remark, leave_out_bad: bool = False) -> Ranking:
    """The ranking of all rows."""
    bad = BadRows(leave_out_bad)
    queries, pages, answers = Hashes(), Hashes(), array("b")
    owners = array("i")  # which row a page stands in
    for number, row in enumerate(source.rows(bad, remark)):
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
        for row in source.rows(BadRows(True), lambda text: None):
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
