"""Chooses the page on which each keyword is checked: the page that a file assigns to it, or the best match.

A keyword usually has one target page on a site. If it were checked on every page, all other pages would fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.errors import ConfigError
from unisono.recipes.seo.data.bad_rows import BadRows, no_remark
from unisono.recipes.seo.data.tables import TABLES, rows_of, text_in
from unisono.recipes.seo.site.page_rules import keyword_check
from unisono.recipes.seo.site.text_rules import Check, words_of

if TYPE_CHECKING:
    from unisono.recipes.seo.data.pages import Page

_PAGE, _KEYWORD = ("page", "url", "file"), ("keyword", "keywords", "query")
_TITLE, _H1, _DESCRIPTION = 3.0, 2.0, 1.0  # weights of a matching word; matches in the text add at most 1
_HALF = 2.0  # number of occurrences in the text that add 0.5


@dataclass(frozen=True)
class Keywords:
    """Keywords of the whole site, and keywords of single pages."""

    of_site: Sequence[str] = ()
    of_pages: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Keywords of single pages, by the page's name in the report."""


def read_keywords(text: str) -> Keywords:
    """Reads `A,B` from the command line, or a .csv or .jsonl file with the columns page and keyword."""
    path = Path(text).expanduser()
    if not text.lower().endswith(TABLES):
        return Keywords([part.strip() for part in text.split(",") if words_of(part)])
    if not path.is_file():
        raise ConfigError(f"--keywords {text}: no such file; pass A,B or a file with the columns page and keyword")
    bad, of_site = BadRows(False), list[str]()
    of_pages: dict[str, list[str]] = {}
    for row in rows_of(path, (_KEYWORD,), bad):
        page, keyword = text_in(row.first(_PAGE)), text_in(row.first(_KEYWORD))
        if keyword and words_of(keyword):
            (of_site if page is None else of_pages.setdefault(page, [])).append(keyword)
    bad.report(no_remark, len(of_site) + len(of_pages), "row", path)
    return Keywords(of_site, of_pages)


@dataclass(frozen=True)
class _Match:
    score: float
    number: int
    page: str
    check: Check


class KeywordPages:
    """Finds the page of each keyword in one pass over the pages."""

    def __init__(self, keywords: Keywords) -> None:
        self._keywords, self._best = keywords, dict[str, _Match]()
        self._assigned: list[tuple[int, Check]] = []
        self._missing = set(keywords.of_pages)
        self._num_pages = 0

    def add(self, number: int, page: Page) -> None:
        """Compares page `number` of the report with all keywords."""
        self._num_pages += 1
        self._missing.discard(page.name)
        for keyword in self._keywords.of_pages.get(page.name, ()):
            self._assigned.append((number, keyword_check(page, keyword)))
        if not self._keywords.of_site:
            return
        score_of = _scorer(page)
        for keyword in self._keywords.of_site:
            score, best = score_of(keyword), self._best.get(keyword)
            if best is None or score > best.score:
                self._best[keyword] = _Match(score, number, page.name, keyword_check(page, keyword))

    def checks(self) -> Iterator[tuple[int, Check]]:
        """Yields the result of each keyword check with the number of its page."""
        yield from self._assigned
        for match in self._best.values():
            if match.score or self._num_pages == 1:
                yield match.number, match.check

    def remarks(self) -> Iterator[str]:
        """Yields a remark for each keyword that says on which page it was checked."""
        if self._num_pages > 1:
            for keyword, match in self._best.items():
                if match.score:
                    yield f"Keyword “{keyword}”: checked on {match.page[:100]}, the best match by words."
                else:
                    yield f"Keyword “{keyword}”: no page contains any of its words."
        for page in sorted(self._missing):
            yield f"--keywords names {page[:100]}, which is not among the pages."


def _scorer(page: Page) -> Callable[[str], float]:
    """Returns a function that scores how well a keyword matches a page, by where and how often its words occur."""
    h1 = " ".join(text for level, text in page.headings if level == 1)
    weighted = [
        (weight, set(words_of(text or "")))
        for weight, text in ((_TITLE, page.title), (_H1, h1), (_DESCRIPTION, page.description))
    ]
    counts = Counter(words_of(page.text))

    def score(keyword: str) -> float:
        words = set(words_of(keyword))
        return sum(counts[word] / (counts[word] + _HALF) for word in words) + sum(
            weight * len(words & present) for weight, present in weighted
        )

    return score
