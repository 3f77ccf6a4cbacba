"""Which page each keyword is checked on: the page that a file assigns it to, or else the one that fits it best.

A keyword has one target page on a site. Checked on every page, each page would fail for the keywords of all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.errors import ConfigError
from unisono.recipes.seo.data.bad_rows import BadRows
from unisono.recipes.seo.data.tables import TABLES, rows_of, text_in
from unisono.recipes.seo.site.page_rules import keyword_check
from unisono.recipes.seo.site.text_rules import Check, words_of

if TYPE_CHECKING:
    from unisono.recipes.seo.data.pages import Page

_PAGE, _KEYWORD = ("page", "url", "file"), ("keyword", "keywords", "query")
_IN_TITLE, _IN_H1, _IN_DESCRIPTION = 3.0, 2.0, 1.0  # beside at most 1 for the text, however often it stands there
_HALF = 2.0  # times in the text that count half of many


@dataclass(frozen=True)
class Keywords:
    """What the user wants to be found for: keywords of the whole site, and keywords of single pages."""

    of_site: Sequence[str] = ()
    of_pages: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By a page's name in the report."""


def read_keywords(text: str) -> Keywords:
    """From `A,B` on the command line, or from a .csv or .jsonl file with the columns page and keyword."""
    path = Path(text).expanduser()
    if not text.lower().endswith(TABLES):
        return Keywords([part.strip() for part in text.split(",") if words_of(part)])
    if not path.is_file():
        raise ConfigError(f"--keywords {text}: there is no such file; give A,B or a file with columns page and keyword")
    bad, of_site = BadRows(False), list[str]()
    of_pages: dict[str, list[str]] = {}
    for row in rows_of(path, (_KEYWORD,), bad):
        page, keyword = text_in(row.first(_PAGE)), text_in(row.first(_KEYWORD))
        if keyword and words_of(keyword):
            (of_site if page is None else of_pages.setdefault(page, [])).append(keyword)
    bad.report(print, len(of_site) + len(of_pages), "row", path)
    return Keywords(of_site, of_pages)


@dataclass(frozen=True)
class _Fit:
    score: float
    number: int
    page: str
    check: Check


class KeywordPages:
    """Finds the page of each keyword while pages come one after the other, and keeps none of them."""

    def __init__(self, keywords: Keywords) -> None:
        self._keywords, self._best = keywords, dict[str, _Fit]()
        self._assigned: list[tuple[int, Check]] = []
        self._missing = set(keywords.of_pages)
        self._num_pages = 0

    def add(self, number: int, page: Page) -> None:
        """Looks at page `number` of the report."""
        self._num_pages += 1
        self._missing.discard(page.name)
        for keyword in self._keywords.of_pages.get(page.name, ()):
            self._assigned.append((number, keyword_check(page, keyword)))
        if not self._keywords.of_site:
            return
        words = _Words.of(page)
        for keyword in self._keywords.of_site:
            score, before = words.fit(keyword), self._best.get(keyword)
            if before is None or score > before.score:
                self._best[keyword] = _Fit(score, number, page.name, keyword_check(page, keyword))

    def checks(self) -> Iterator[tuple[int, Check]]:
        """The number of a page, and the check of a keyword on it."""
        yield from self._assigned
        for fit in self._best.values():
            if fit.score or self._num_pages == 1:
                yield fit.number, fit.check

    def remarks(self) -> Iterator[str]:
        """Which page each keyword was checked on."""
        if self._num_pages > 1:
            for keyword, fit in self._best.items():
                if fit.score:
                    yield f"Keyword “{keyword}”: checked on {fit.page[:100]}, the page that fits it best by its words."
                else:
                    yield f"Keyword “{keyword}”: no page has any of its words."
        for page in sorted(self._missing):
            yield f"--keywords names {page[:100]}, which is not among the pages."


@dataclass(frozen=True)
class _Words:
    title: frozenset[str]
    tops: frozenset[str]
    description: frozenset[str]
    text: Counter[str]

    @classmethod
    def of(cls, page: Page) -> _Words:
        tops = " ".join(text for level, text in page.headings if level == 1)
        title, top, description = (frozenset(words_of(text or "")) for text in (page.title, tops, page.description))
        return cls(title, top, description, Counter(words_of(page.text)))

    def fit(self, keyword: str) -> float:
        """How well a page fits a keyword: where its words stand, and how often."""
        return sum(
            _IN_TITLE * (word in self.title)
            + _IN_H1 * (word in self.tops)
            + _IN_DESCRIPTION * (word in self.description)
            + self.text[word] / (self.text[word] + _HALF)
            for word in set(words_of(keyword))
        )
