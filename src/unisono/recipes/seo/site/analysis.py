"""What rules and a model find of a site: every page read once, none of them kept."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from unisono.recipes.seo.data.pages import Page
    from unisono.recipes.seo.metrics.baselines import BM25
    from unisono.recipes.seo.site.keywords import KeywordPages, Keywords
    from unisono.recipes.seo.site.page_rules import Repeats
    from unisono.recipes.seo.site.pages import Site
    from unisono.recipes.seo.site.report import Findings, PageFindings

_BLOCK = 64  # pages that a model reads at once
_TOP_PAGES, _TOP_QUERIES = 10, 3
_SAY_EVERY_S = 5.0


@dataclass(frozen=True)
class Judge:
    """A trained model: it gives each page a score (and a class), or each page a score for each query."""

    name: str
    score: Callable[[Sequence[str]], Sequence[tuple[float, str]]] | None = None
    rank: Callable[[Sequence[str], Sequence[str]], NDArray[np.floating[Any]]] | None = None
    """[queries, pages]"""


def look_at(
    site: Site, keywords: Keywords | None = None, queries: Sequence[str] = (), judge: Judge | None = None
) -> Findings:
    """Reads every page of a site once, and says what rules and a model find."""
    from unisono.recipes.seo.site.keywords import KeywordPages, Keywords
    from unisono.recipes.seo.site.page_rules import Repeats
    from unisono.recipes.seo.site.report import Findings

    findings, repeats, targets = Findings(site.name, []), Repeats(), KeywordPages(keywords or Keywords())
    best = _Best(len(queries), len(site.pages)) if queries else None
    texts = _read_all(site, findings.pages, repeats, targets, queries, judge, best)
    if best is None:
        deque(texts, maxlen=0)
    else:
        from unisono.recipes.seo.metrics.baselines import BM25

        _answer(findings, queries, BM25(texts), best, judge)
    if judge and judge.score:
        findings.scored_by = judge.name
    for number, check in targets.checks():
        findings.pages[number].checks.append(check)
    _add_repeats(findings, repeats)
    findings.fetched = dict(site.fetcher.got) if site.fetcher else {}
    findings.remarks = [*_remarks(findings, site, queries, judge), *targets.remarks()]
    return findings


def _read_all(
    site: Site,
    found: list[PageFindings],
    repeats: Repeats,
    targets: KeywordPages,
    queries: Sequence[str],
    judge: Judge | None,
    best: _Best | None,
) -> Iterator[str]:
    """Checks page after page, lets the model read them in blocks, and gives their texts on: none is kept."""
    waiting: list[tuple[int, str]] = []
    said = time.monotonic()
    for place, (name, where) in enumerate(site.pages):
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            print(f"read {place:,} of {len(site.pages):,} pages", file=sys.stderr)
        text = _look_at_page(site, name, where, found, repeats, targets)
        if text is None:
            continue
        if text.strip():
            waiting.append((len(found) - 1, text))
        if len(waiting) == _BLOCK:
            _judge(waiting, found, queries, judge, best)
            waiting = []
        yield text
    if waiting:
        _judge(waiting, found, queries, judge, best)


def _look_at_page(
    site: Site, name: str, where: Path | str, found: list[PageFindings], repeats: Repeats, targets: KeywordPages
) -> str | None:
    """Adds what rules find of one page; returns its text, None for a page that is left out."""
    from unisono.recipes.seo.data.pages import Page, parse_page
    from unisono.recipes.seo.site.fetching import Unreadable
    from unisono.recipes.seo.site.page_rules import check_page
    from unisono.recipes.seo.site.report import PageFindings, is_report
    from unisono.recipes.seo.site.text_rules import words_of

    unreadable = ""
    try:
        content = site.read(where)
        if is_report(content):
            return None
        page = parse_page(content, name)
        if not page.is_html:
            unreadable = "; ".join(page.problems)
    except Unreadable as error:
        page, unreadable = Page(name), str(error)
    repeats.add(page)
    checks = [] if unreadable else check_page(page, exists=site.exists_from(where))
    if not unreadable:
        targets.add(len(found), page)
    found.append(PageFindings(name, where, page.title or "", len(words_of(page.text)), checks, unreadable))
    return text_for_models(page)


def text_for_models(page: Page) -> str:
    """What a model reads of a page: its title, then its text."""
    return f"{page.title or ''}\n\n{page.text}".strip()


def _judge(
    pages: Sequence[tuple[int, str]],
    found: list[PageFindings],
    queries: Sequence[str],
    judge: Judge | None,
    best: _Best | None,
) -> None:
    if judge is None:
        return
    numbers, texts = [number for number, _ in pages], [text for _, text in pages]
    if judge.score:
        for number, (score, label) in zip(numbers, judge.score(texts), strict=True):
            found[number].score, found[number].label = score, label
    if judge.rank and best:
        best.add(range(len(queries)), numbers, judge.rank(queries, texts))


class _Best:
    """The best pages of each query and the best queries of each page, kept while pages come in blocks."""

    def __init__(self, num_queries: int, num_pages: int) -> None:
        import numpy as np

        sizes = ((num_queries, _TOP_PAGES), (num_pages, _TOP_QUERIES))
        self._scores = [np.full(size, -np.inf, np.float32) for size in sizes]
        self._numbers = [np.zeros(size, np.int64) for size in sizes]

    def add(self, queries: Sequence[int], pages: Sequence[int], scores: NDArray[np.floating[Any]]) -> None:
        """Scores [queries, pages] of these."""
        import numpy as np

        scores = np.where(np.isfinite(scores), scores, -np.inf).astype(np.float32)
        for side, (rows, columns, new) in enumerate(((queries, pages, scores), (pages, queries, scores.T))):
            kept, known = self._scores[side][rows], self._numbers[side][rows]
            every = np.concatenate([kept, new], axis=1)
            numbers = np.concatenate([known, np.broadcast_to(np.asarray(columns), new.shape)], axis=1)
            order = np.argsort(-every, axis=1, kind="stable")[:, : kept.shape[1]]  # of equals, who came first
            self._scores[side][rows] = np.take_along_axis(every, order, axis=1)
            self._numbers[side][rows] = np.take_along_axis(numbers, order, axis=1)

    def pages_of(self, query: int) -> list[tuple[int, float]]:
        """Page and score, best first."""
        return self._of(0, query)

    def queries_of(self, page: int) -> list[tuple[int, float]]:
        """Query and score, best first."""
        return self._of(1, page)

    def _of(self, side: int, row: int) -> list[tuple[int, float]]:
        pairs = zip(self._numbers[side][row].tolist(), self._scores[side][row].tolist(), strict=True)
        return [(number, score) for number, score in pairs if score > float("-inf")]


def _answer(findings: Findings, queries: Sequence[str], by_words: BM25, best: _Best, judge: Judge | None) -> None:
    """Fills in the best pages of each query, with their places by words; without a model those are the order."""
    import numpy as np

    from unisono.recipes.seo.site.report import Answer

    learned = judge is not None and judge.rank is not None
    everything = range(len(findings.pages))
    for number, query in enumerate(queries):
        scores = by_words.scores(query)
        if not learned:
            best.add([number], everything, np.where(scores > 0, scores, -np.inf)[None])
        answers = []
        for page, score in best.pages_of(number):
            ahead = int((scores > scores[page]).sum() + (scores[:page] == scores[page]).sum())
            answers.append(Answer(page, score, ahead + 1 if scores[page] > 0 else None))
        findings.queries.append((query, answers))
    for page in everything:
        findings.pages[page].best_queries = [(queries[query], score) for query, score in best.queries_of(page)]
    findings.ranked_by = judge.name if learned and judge else "BM25 (words in common, nothing learned)"


def _add_repeats(findings: Findings, repeats: Repeats) -> None:
    """The groups of duplicates, and a failed check for each page in one."""
    from unisono.recipes.seo.site.report import Repeat
    from unisono.recipes.seo.site.text_rules import Check

    groups = [
        *(Repeat("same text", pages) for pages in repeats.same_texts()),
        *(Repeat("nearly the same text", pages, share) for pages, share in repeats.alike()),
        *(Repeat("same title", pages) for pages in repeats.same_titles()),
        *(Repeat("same description", pages) for pages in repeats.same_descriptions()),
    ]
    for group in groups:
        if group.what.endswith("text"):
            advice = "Keep one and redirect the others, or name one as canonical in all of them."
        else:
            advice = f"Give each page a {group.what.removeprefix('same ')} of its own."
        for page in group.pages:
            other = findings.pages[next(number for number in group.pages if number != page)].name
            more = f" and {len(group.pages) - 2:,} more" if len(group.pages) > 2 else ""
            findings.pages[page].checks.append(Check(group.what, False, f"as {other[:100]}{more}", advice))
    findings.repeats = groups


def _remarks(findings: Findings, site: Site, queries: Sequence[str], judge: Judge | None) -> list[str]:
    said = list(site.remarks)
    if judge is None:
        said.append("No --run was given: rules only, nothing learned.")
    else:
        said.append(f"Scores are learned, by {judge.name}; checks are plain rules. They are not mixed.")
    if findings.fetched:
        hosts = ", ".join(f"{host} ({size:,} bytes)" for host, size in findings.fetched.items())
        said.append(f"Fetched from {hosts}.")
    elif site.fetcher is None:
        said.append("Read from local files; nothing was fetched.")
    if site.fetcher is not None:
        said.append("Links are not followed: broken ones are only looked for in local files.")
    return said
