"""Analyses a site with rules and a model; reads every page once and keeps none in memory."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.seo.data.pages import Page, parse_page
from unisono.recipes.seo.site.duplicates import Duplicates
from unisono.recipes.seo.site.fetching import Unreadable
from unisono.recipes.seo.site.gathering import Gathering
from unisono.recipes.seo.site.keywords import KeywordPages, Keywords
from unisono.recipes.seo.site.page_rules import check_page
from unisono.recipes.seo.site.pages import Site
from unisono.recipes.seo.site.report import Answer, DuplicateGroup, Findings, PageFindings, is_report
from unisono.recipes.seo.site.semantic.contents import Contents
from unisono.recipes.seo.site.technical.checks import technical_findings
from unisono.recipes.seo.site.technical.page_facts import PageFacts, add_facts
from unisono.recipes.seo.site.technical.site_facts import SiteFacts
from unisono.recipes.seo.site.text_rules import Check, words_of

if TYPE_CHECKING:
    from unisono.recipes.seo.data.search_console import SearchConsole
    from unisono.recipes.seo.site.semantic.rivals import Seen
    from unisono.recipes.seo.site.semantic.space import Encoder

_BLOCK = 64  # pages per call of the model
_TOP_PAGES, _TOP_QUERIES = 10, 3
_PROGRESS_EVERY_S = 5.0


@dataclass(frozen=True)
class Model:
    """A trained model that scores each page, or each page for each query."""

    name: str
    score: Callable[[Sequence[str]], Sequence[tuple[float, str]]] | None = None
    """Scores each text; also returns its most likely class."""
    rank: Callable[[Sequence[str], Sequence[str]], NDArray[np.floating[Any]]] | None = None
    """Scores each text for each query: [queries, pages]."""


@dataclass(frozen=True)
class Comparison:
    """Options for comparing the pages of a site with each other."""

    encoder: Encoder | None = None
    """Encoder that compares the pages; None: compare them by BM25 only."""
    old: Site | None = None
    """An earlier version of the site, whose pages are mapped to the new ones."""
    export: SearchConsole | None = None
    """Clicks and positions from Google."""


def analyse(
    site: Site,
    keywords: Keywords | None = None,
    queries: Sequence[str] = (),
    model: Model | None = None,
    base_url: str | None = None,
    comparison: Comparison | None = None,
) -> Findings:
    """Checks every page with rules and scores it with a model; `base_url` is the URL that serves a local folder."""
    matches, gathering = KeywordPages(keywords or Keywords()), Gathering(site, base_url)
    analysis = _Analysis(site, matches, queries, model, gathering, comparison)
    texts = analysis.read_pages()
    if queries:
        from unisono.recipes.seo.metrics.baselines import BM25

        analysis.add_answers(BM25(texts))
    else:
        deque(texts, maxlen=0)
    return analysis.finish()


class _Analysis:
    def __init__(
        self,
        site: Site,
        keyword_pages: KeywordPages,
        queries: Sequence[str],
        model: Model | None,
        gathering: Gathering,
        comparison: Comparison | None = None,
    ) -> None:
        self._site, self._keyword_pages, self._queries, self._model = site, keyword_pages, queries, model
        self._gathering, self._comparison = gathering, comparison
        self._contents: Contents | None = None
        if comparison is not None:
            self._contents = Contents()
        self._duplicates = Duplicates()
        self._best = _Best(len(queries), len(site.pages))
        self._findings = Findings(site.name, [])

    def read_pages(self) -> Iterator[str]:
        """Checks the pages one by one, passes them to the model in blocks, and yields their texts."""
        pending: list[tuple[int, str]] = []
        last_progress = time.monotonic()
        for number, (name, source) in enumerate(self._site.pages):
            if time.monotonic() - last_progress > _PROGRESS_EVERY_S:
                last_progress = time.monotonic()
                print(f"read {number:,} of {len(self._site.pages):,} pages", file=sys.stderr)
            text = self._check_page(name, source)
            if text is None:
                continue
            if text.strip():
                pending.append((len(self._findings.pages) - 1, text))
            if len(pending) == _BLOCK:
                self._apply_model(pending)
                pending = []
            yield text
        if pending:
            self._apply_model(pending)

    def _check_page(self, name: str, source: Path | str) -> str | None:
        """Adds the findings about one page; returns its text, or None if the page is itself a report."""
        unreadable = ""
        try:
            content = self._site.read(source)
            if is_report(content):
                return None
            page = self._gathering.parse(name, source, content)
            if not page.is_html:
                unreadable = "; ".join(page.problems)
        except Unreadable as error:
            page, unreadable = Page(name), str(error)
            self._gathering.add_unreadable(name, source)
        self._duplicates.add(page)
        if self._contents is not None:
            self._contents.add(page, self._gathering.last_link_texts())
        checks: list[Check] = []
        if not unreadable:
            checks = check_page(page, exists=self._site.exists_from(source))
            self._keyword_pages.add(len(self._findings.pages), page)
        num_words = len(words_of(page.text))
        self._findings.pages.append(PageFindings(name, source, page.title or "", num_words, checks, unreadable))
        return text_for_models(page)

    def _apply_model(self, pages: Sequence[tuple[int, str]]) -> None:
        model, numbers, texts = self._model, [number for number, _ in pages], [text for _, text in pages]
        if model and model.score:
            for number, (score, label) in zip(numbers, model.score(texts), strict=True):
                self._findings.pages[number].score, self._findings.pages[number].label = score, label
        if model and model.rank and self._queries:
            self._best.add(range(len(self._queries)), numbers, model.rank(self._queries, texts))

    def add_answers(self, bm25: Any) -> None:
        """Adds the best pages for each query, ranked by the model or else by BM25, with their BM25 ranks."""
        findings, is_learned = self._findings, self._model is not None and self._model.rank is not None
        all_pages = range(len(findings.pages))
        for number, query in enumerate(self._queries):
            scores = bm25.scores(query)
            if not is_learned:
                self._best.add([number], all_pages, np.where(scores > 0, scores, -np.inf)[None])
            answers = []
            for page, score in self._best.pages_of(number):
                num_ahead = int((scores > scores[page]).sum() + (scores[:page] == scores[page]).sum())
                answers.append(Answer(page, score, num_ahead + 1 if scores[page] > 0 else None))
            findings.queries.append((query, answers))
        for page in all_pages:
            best = self._best.queries_of(page)
            findings.pages[page].best_queries = [(self._queries[query], score) for query, score in best]
        findings.ranked_by = self._model.name if is_learned and self._model else "BM25 (word matching, no model)"

    def finish(self) -> Findings:
        """Adds the findings that need all pages, and the remarks."""
        findings, model, site = self._findings, self._model, self._site
        if model and model.score:
            findings.scored_by = model.name
        for number, check in self._keyword_pages.checks():
            findings.pages[number].checks.append(check)
        self._add_duplicates()
        facts = self._gathering.finish()
        findings.technical = technical_findings(facts)
        if self._comparison is not None and self._contents is not None:
            from unisono.recipes.seo.site.semantic.compare import compare_pages

            comparison = self._comparison
            old = None if comparison.old is None else _contents_of(comparison.old)
            seen = self._add_clicks(comparison.export, facts) if comparison.export is not None else {}
            meaning = compare_pages(facts, self._contents, comparison.encoder, self._queries, old, seen)
            findings.meaning = meaning
        findings.fetched = dict(site.fetcher.fetched) if site.fetcher else {}
        remarks = list(site.remarks)
        if model is None:
            remarks.append("Rules only: no model, because --run was not passed.")
        else:
            remarks.append(f"Scores come from {model.name}; checks are fixed rules. They are not combined.")
        if findings.fetched:
            hosts = ", ".join(f"{host} ({size:,} bytes)" for host, size in findings.fetched.items())
            remarks.append(f"Fetched from {hosts}.")
        elif site.fetcher is None:
            remarks.append("Read from local files; nothing was fetched.")
        if site.fetcher is not None and site.crawl is None:
            remarks.append("Broken links are only detected in local files and in a crawl.")
        remarks += findings.meaning.remarks if findings.meaning else []
        findings.remarks = [*remarks, *self._keyword_pages.remarks()]
        return findings

    def _add_clicks(self, export: SearchConsole, facts: SiteFacts) -> dict[str, dict[int, Seen]]:
        """Adds clicks and positions to pages and to the answers of queries; returns them by query and page."""
        from unisono.recipes.seo.site.semantic.clicks import decay_of, seen_pages, total_of, weak_labels

        findings = self._findings
        by_query, by_page, num_missing = seen_pages(export, facts)
        for number, seen in by_page.items():
            findings.pages[number].seen = seen
        for query, answers in findings.queries:
            for answer in answers:
                answer.seen = by_query.get(query, {}).get(answer.page)
        findings.seen_queries = {row.query: total_of([row]) for row in export.queries if row.query}
        for query, rows in export.rows_by_query().items():
            findings.seen_queries.setdefault(query, total_of(rows))
        self._site.remarks += export.remarks
        if num_missing:
            self._site.remarks.append(
                f"The Search Console export names {num_missing:,} pages that the site does not have."
            )
        if export.pairs:
            findings.labels = weak_labels(by_query, decay_of(export.pairs))
        return by_query

    def _add_duplicates(self) -> None:
        """Adds the groups of duplicates, and a failed check for each page of a group."""
        findings, duplicates = self._findings, self._duplicates
        findings.duplicates = [
            *(DuplicateGroup("same text", pages) for pages in duplicates.same_texts()),
            *(DuplicateGroup("nearly the same text", pages, share) for pages, share in duplicates.near_duplicates()),
            *(DuplicateGroup("same title", pages) for pages in duplicates.same_titles()),
            *(DuplicateGroup("same description", pages) for pages in duplicates.same_descriptions()),
        ]
        for group in findings.duplicates:
            if group.kind.endswith("text"):
                advice = "Keep one and redirect the others, or declare one as canonical in all of them."
            else:
                advice = f"Give each page its own {group.kind.removeprefix('same ')}."
            for page in group.pages:
                other = findings.pages[next(number for number in group.pages if number != page)].name
                more = f" and {len(group.pages) - 2:,} more" if len(group.pages) > 2 else ""
                findings.pages[page].checks.append(Check(group.kind, False, f"as {other[:100]}{more}", advice))


def _contents_of(site: Site) -> tuple[list[str], Contents]:
    """Returns the names and contents of a site's pages; skips pages that cannot be read."""
    names, contents = list[str](), Contents()
    for name, source in site.pages:
        try:
            facts = PageFacts(name, name)
            page = parse_page(site.read(source), name, partial(add_facts, facts))
        except Unreadable:
            continue
        if page.is_html:
            names.append(name)
            contents.add(page, [link.text for link in facts.links])
    return names, contents


def text_for_models(page: Page) -> str:
    """Returns the text that a model reads: the page's title, then its text."""
    return f"{page.title or ''}\n\n{page.text}".strip()


class _Best:
    """The best pages of each query and the best queries of each page, updated block by block."""

    def __init__(self, num_queries: int, num_pages: int) -> None:
        sizes = ((num_queries, _TOP_PAGES), (num_pages, _TOP_QUERIES))
        self._scores = [np.full(size, -np.inf, np.float32) for size in sizes]
        self._numbers = [np.zeros(size, np.int64) for size in sizes]

    def add(self, queries: Sequence[int], pages: Sequence[int], scores: NDArray[np.floating[Any]]) -> None:
        """Adds scores [queries, pages]."""
        scores = np.where(np.isfinite(scores), scores, -np.inf).astype(np.float32)
        for side, (rows, columns, new) in enumerate(((queries, pages, scores), (pages, queries, scores.T))):
            best, best_numbers = self._scores[side][rows], self._numbers[side][rows]
            joined = np.concatenate([best, new], axis=1)
            numbers = np.concatenate([best_numbers, np.broadcast_to(np.asarray(columns), new.shape)], axis=1)
            order = np.argsort(-joined, axis=1, kind="stable")[:, : best.shape[1]]  # in a tie, the earlier page wins
            self._scores[side][rows] = np.take_along_axis(joined, order, axis=1)
            self._numbers[side][rows] = np.take_along_axis(numbers, order, axis=1)

    def pages_of(self, query: int) -> list[tuple[int, float]]:
        """Returns the best pages of a query with their scores, best first."""
        return self._of(0, query)

    def queries_of(self, page: int) -> list[tuple[int, float]]:
        """Returns the best queries of a page with their scores, best first."""
        return self._of(1, page)

    def _of(self, side: int, row: int) -> list[tuple[int, float]]:
        pairs = zip(self._numbers[side][row].tolist(), self._scores[side][row].tolist(), strict=True)
        return [(number, score) for number, score in pairs if score > float("-inf")]
