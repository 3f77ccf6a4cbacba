"""Ranking data sets with ids and a separate file of judgements: BEIR and MS MARCO."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from unisono.config.values import shown
from unisono.recipes.seo.data.bad_rows import BadRows
from unisono.recipes.seo.data.lines import lines_of
from unisono.recipes.seo.data.ranking_sets.ids import Hashes, Ids
from unisono.recipes.seo.data.ranking_sets.ranking import Ranking, Remark, judgements

_AT_ONCE = 65_536


class Text(NamedTuple):
    """A query or a page."""

    line: int
    id: str
    text: str


class Judged(NamedTuple):
    """A judgement of a page for a query; grade 0: not relevant."""

    line: int
    query: str
    page: str
    grade: float


class Source(Protocol):
    """A data set on disk; unusable rows are added to `bad`."""

    queries_file: Path
    pages_file: Path
    judged_file: Path
    splits: tuple[str, ...]

    def queries(self, bad: BadRows) -> Iterator[Text]: ...

    def pages(self, bad: BadRows) -> Iterator[Text]: ...

    def judged(self, bad: BadRows) -> Iterator[Judged]: ...


def ranking_by_ids(source: Source, remark: Remark, leave_out_bad: bool) -> Ranking:
    """Returns the pages of a data set, and the queries that this split judges."""
    bad = BadRows(leave_out_bad)
    pages = _index(source.pages, source.pages_file, bad)
    bad.report(remark, len(pages), "page", source.pages_file)
    bad = BadRows(leave_out_bad)
    queries = _index(source.queries, source.queries_file, bad)
    bad.report(remark, len(queries), "query", source.queries_file)
    bad = BadRows(leave_out_bad)
    of_query, of_page, grades = _lookup(source, queries, pages, bad)

    answered = np.zeros(len(queries), bool)
    answered[of_query[grades > 0]] = True
    judged = np.zeros(len(queries), bool)
    judged[of_query] = True
    unanswered = np.flatnonzero(judged & ~answered)
    if len(unanswered):
        query = _nth(source.queries, queries, int(unanswered[0])).id
        problem = f"a query without positives: all grades of {shown(query)} are 0"
        bad.add(str(source.judged_file), problem, len(unanswered))
    bad.report(remark, int(answered.sum()), "judged query", source.judged_file)
    if len(source.splits) == 1 and not judged.all():
        remark(f"{int((~judged).sum()):,} of {len(queries):,} queries have no judgement in {source.judged_file.name}")

    number = np.cumsum(answered, dtype=np.int32) - 1  # new query numbers, because only queries of this split remain
    used = answered[of_query]
    positives, hard = judgements(number[of_query[used]].astype(np.int32), of_page[used], grades[used], len(pages))
    chosen = queries.first.copy()
    chosen[chosen] = answered
    return Ranking(
        int(answered.sum()),
        len(pages),
        positives,
        hard,
        (source.pages_file,),
        (source.queries_file, source.judged_file),
        source.splits,
        _queries=lambda: _stream(source.queries, chosen),
        _pages=lambda: _stream(source.pages, pages.first),
    )


def _index(texts: Callable[[BadRows], Iterator[Text]], file: Path, bad: BadRows) -> Ids:
    hashes = Hashes()
    for each in texts(bad):
        hashes.add(each.id)
    ids = Ids(hashes.array())
    again = np.flatnonzero(~ids.first)
    if len(again):
        each = next(islice(texts(BadRows(True)), int(again[0]), None))
        bad.add(f"{file}, line {each.line}", f"the id {shown(each.id)} occurs a second time", len(again))
    return ids


def _lookup(
    source: Source, queries: Ids, pages: Ids, bad: BadRows
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """Returns query number, page number and grade of every judgement with known ids."""
    columns: list[array[Any]] = [array("i"), array("i"), array("f")]
    lines = source.judged(bad)
    while some := list(islice(lines, _AT_ONCE)):
        of_query, of_page = queries.numbers([each.query for each in some]), pages.numbers([each.page for each in some])
        for place in np.flatnonzero((of_query < 0) | (of_page < 0)).tolist():
            each, lacks_query = some[place], of_query[place] < 0
            missing, file = (each.query, source.queries_file) if lacks_query else (each.page, source.pages_file)
            kind = "query" if lacks_query else "page"
            bad.add(
                f"{source.judged_file}, line {each.line}",
                f"there is no {kind} with the id {shown(missing)} in {file.name}",
            )
        has_ids = (of_query >= 0) & (of_page >= 0)
        grades = np.array([each.grade for each in some], np.float32)
        for column, new in zip(columns, (of_query, of_page, grades), strict=True):
            column.frombytes(new[has_ids].tobytes())
    return np.array(columns[0], np.int32), np.array(columns[1], np.int32), np.array(columns[2], np.float32)


def _stream(texts: Callable[[BadRows], Iterator[Text]], chosen: NDArray[np.bool_]) -> Iterator[str]:
    for place, each in enumerate(texts(BadRows(True))):
        if place < len(chosen) and chosen[place]:
            yield each.text


def _nth(texts: Callable[[BadRows], Iterator[Text]], ids: Ids, number: int) -> Text:
    place = int(np.flatnonzero(ids.first)[number])
    return next(islice(texts(BadRows(True)), place, None))


def judged_lines(file: Path, bad: BadRows) -> Iterator[Judged]:
    """Yields the lines of a qrels file: query, page, grade; or, as in TREC, query, 0, page, grade."""
    for number, line in lines_of(file):
        fields = line.split("\t") if "\t" in line else line.split()
        fields = [field.strip() for field in fields]
        if not any(fields):
            continue
        query, page, grade = (fields[0], fields[-2], fields[-1]) if len(fields) in (3, 4) else ("", "", "")
        try:
            score = float(grade)
            if not query or not page or not abs(score) < 1e6:
                raise ValueError
        except ValueError:
            if number > 1 or len(fields) not in (3, 4):  # the first line may be a header
                bad.add(f"{file}, line {number}", f"expected query, page and grade, got {shown(line.strip())}")
            continue
        yield Judged(number, query, page, score)
