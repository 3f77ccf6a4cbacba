"""The report of a site: one HTML page, and the same findings as JSON.

The page makes no network request, and its template escapes everything that comes from the site, such as titles. The
results of rules and the scores of a model are separate.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unisono import __version__
from unisono.pages.kit import generator, relative_link, render, web_link
from unisono.recipes.common.cache_files import write_cache_file
from unisono.recipes.seo.site.text_rules import Check

FILES = ("report.html", "report.json")
MOST_SHOWN, MOST_QUERIES, MOST_GROUPS = 5_000, 300, 300
"""Pages, queries and groups of duplicates on the page; report.json has all."""

_KIND = "seo"


@dataclass
class PageFindings:
    """What was found out about one page."""

    name: str
    place: Path | str
    """Its file or its address."""
    title: str = ""
    num_words: int = 0
    checks: list[Check] = field(default_factory=list)
    unreadable: str = ""
    """Why it could not be read."""
    score: float | None = None
    label: str = ""
    """The class that a model gives it."""
    best_queries: list[tuple[str, float]] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        """The checks that something is to be done about."""
        return [check for check in self.checks if check.failed]


@dataclass
class Answer:
    """A page that was found for a query."""

    page: int
    score: float
    place_by_words: int | None
    """Where BM25 has it, from 1; None: it shares no word with the query."""


@dataclass
class Repeat:
    """Pages that repeat each other."""

    what: str
    pages: list[int]
    share: float = 1.0


@dataclass
class Findings:
    """All that a report shows."""

    site: str
    pages: list[PageFindings]
    repeats: list[Repeat] = field(default_factory=list)
    queries: list[tuple[str, list[Answer]]] = field(default_factory=list)
    ranked_by: str = ""
    """Whose order the queries' pages are in."""
    scored_by: str = ""
    """Whose scores the pages have; empty: there are none."""
    remarks: list[str] = field(default_factory=list)
    fetched: dict[str, int] = field(default_factory=dict)
    """Bytes by host."""


def as_json(findings: Findings) -> dict[str, Any]:
    """The findings as report.json has them."""
    names = [page.name for page in findings.pages]
    return {
        "site": findings.site,
        "made_by": f"unisono {__version__}",
        "remarks": findings.remarks,
        "fetched_bytes": findings.fetched,
        "checks_are": "plain rules, not learned",
        "scored_by": findings.scored_by or None,
        "ranked_by": findings.ranked_by or None,
        "pages": [_page_json(page) for page in findings.pages],
        "duplicates": [
            {"what": repeat.what, "share": round(repeat.share, 3), "pages": [names[number] for number in repeat.pages]}
            for repeat in findings.repeats
        ],
        "queries": [
            {
                "query": query,
                "pages": [
                    {
                        "page": names[answer.page],
                        "score": round(answer.score, 5),
                        "place_by_words": answer.place_by_words,
                    }
                    for answer in answers
                ],
            }
            for query, answers in findings.queries
        ],
    }


def _page_json(page: PageFindings) -> dict[str, Any]:
    return {
        "page": page.name,
        "title": page.title,
        "words": page.num_words,
        "unreadable": page.unreadable or None,
        "score": None if page.score is None else round(page.score, 5),
        "label": page.label or None,
        "best_queries": [{"query": query, "score": round(score, 5)} for query, score in page.best_queries],
        "checks": [asdict(check) for check in page.checks],
    }


def write_report(folder: Path, findings: Findings) -> Path:
    """Writes both files into a folder, each whole or not at all; returns the page."""
    content_json = json.dumps(as_json(findings), indent=1, ensure_ascii=False, allow_nan=False)
    for name, content in zip(FILES, (html(findings, folder), content_json), strict=True):
        write_cache_file(folder / name, content.encode("utf-8", "replace"))
    return folder / FILES[0]


def is_report(content: bytes | str) -> bool:
    """Whether a page is a report of ours, which may be among the pages of a site."""
    mark = generator(_KIND)
    return mark in content[:500] if isinstance(content, str) else mark.encode() in content[:500]


def html(findings: Findings, folder: Path) -> str:
    """Returns the page, with links relative to the folder it will be in."""
    failed = _failed_names(findings)
    return render(
        Path(__file__).with_name("report.html"),
        kind=_KIND,
        title=f"{findings.site}: report",
        site=findings.site,
        remarks=findings.remarks,
        tiles_shown=_tiles(findings),
        checks=_checks(findings, failed),
        num_read=max(1, sum(not page.unreadable for page in findings.pages)),
        **_pages(findings, failed, folder),
        **_queries(findings),
        **_duplicates(findings),
        version=__version__,
    )


def _tiles(findings: Findings) -> list[tuple[str, str, str]]:
    pages = findings.pages
    num_unread = sum(bool(page.unreadable) for page in pages)
    scores = sorted(page.score for page in pages if page.score is not None)
    tiles = [("pages", f"{len(pages):,}"), ("with a failed check", f"{sum(bool(page.failed) for page in pages):,}")]
    tiles += [("could not be read", f"{num_unread:,}")] if num_unread else []
    tiles += [("groups of duplicates", f"{len(findings.repeats):,}")]
    tiles += [("median score (learned)", f"{scores[len(scores) // 2]:.3f}")] if scores else []
    tiles += [("queries", f"{len(findings.queries):,}")] if findings.queries else []
    return [(label, value, "") for label, value in tiles]


def _failed_names(findings: Findings) -> dict[str, int]:
    """Returns the checks that failed somewhere with their number of pages, most often first."""
    counts = Counter(name for page in findings.pages for name in {check.name for check in page.failed})
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _checks(findings: Findings, failed: dict[str, int]) -> list[dict[str, Any]]:
    advice: dict[str, Counter[str]] = {name: Counter() for name in failed}
    for page in findings.pages:
        for check in page.failed:
            advice[check.name][check.advice] += 1
    return [
        {"name": name, "count": count, "advice": advice[name].most_common(1)[0][0]} for name, count in failed.items()
    ]


def _pages(findings: Findings, failed: dict[str, int], folder: Path) -> dict[str, Any]:
    has_scores = bool(findings.scored_by)
    if has_scores:
        order = sorted(findings.pages, key=lambda page: (page.score is None, -(page.score or 0.0), page.name))
    else:
        order = sorted(findings.pages, key=lambda page: (-bool(page.unreadable), -len(page.failed), page.name))
    num_more = len(order) - MOST_SHOWN
    numbers = {name: number for number, name in enumerate(failed)}
    return {
        "page_notes": [
            *([f"Scores: {findings.scored_by}, best first."] if has_scores else []),
            *([f"{num_more:,} more pages are in report.json."] if num_more > 0 else []),
        ],
        "columns": ["page", *(["score"] if has_scores else []), "words", "failed"],
        "rows": [_row(page, numbers, folder) for page in order[:MOST_SHOWN]],
    }


def _row(page: PageFindings, numbers: dict[str, int], folder: Path) -> dict[str, Any]:
    return {
        "name": page.name,
        "title": page.title.strip(),
        "link": web_link(page.place) if isinstance(page.place, str) else relative_link(page.place, folder),
        "checks": [numbers[check.name] for check in page.failed],
        "failed": page.failed,
        "unreadable": page.unreadable,
        "num_words": page.num_words,
        "score": "" if page.score is None else f"{page.score:.6g}",
        "score_shown": "–" if page.score is None else f"{page.score:.3f}",
        "label": page.label,
        "best_queries": page.best_queries,
    }


def _queries(findings: Findings) -> dict[str, Any]:
    note = f"Ordered by {findings.ranked_by}. “By words” is the page's rank by BM25, without any model."
    num_more = len(findings.queries) - MOST_QUERIES
    note += f" {num_more:,} more queries are in report.json." if num_more > 0 else ""
    return {
        "query_note": note,
        "queries": [
            {"text": query, "answers": [_answer(findings.pages[answer.page], answer) for answer in answers]}
            for query, answers in findings.queries[:MOST_QUERIES]
        ],
    }


def _answer(page: PageFindings, answer: Answer) -> dict[str, Any]:
    return {
        "title": page.title.strip() or page.name,
        "name": page.name,
        "score": answer.score,
        "place_by_words": answer.place_by_words,
    }


def _duplicates(findings: Findings) -> dict[str, Any]:
    groups = []
    for repeat in findings.repeats[:MOST_GROUPS]:
        names = [findings.pages[number].name for number in repeat.pages]
        more = [f"and {len(names) - 20:,} more"] if len(names) > 20 else []
        share = f"{repeat.share:.0%}" if repeat.share < 1 else ""
        groups.append({"what": repeat.what, "share": share, "names": [*names[:20], *more]})
    return {"duplicates": groups, "num_more_duplicates": max(0, len(findings.repeats) - MOST_GROUPS)}
