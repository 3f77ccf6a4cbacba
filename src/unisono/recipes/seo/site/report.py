"""Writes the report about a site: one HTML page, all data as JSON, and the findings as CSV.

The page works offline. It shows the results of rules and the output of a model separately.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono import __version__
from unisono.pages.kit import generator, relative_link, render, web_link
from unisono.recipes.common.cache_files import write_cache_file
from unisono.recipes.seo.site.changes import Changes
from unisono.recipes.seo.site.finding import SEVERITIES, Finding, of_check, worst_first
from unisono.recipes.seo.site.tables import csv_of, findings_csv
from unisono.recipes.seo.site.text_rules import Check

if TYPE_CHECKING:
    from unisono.recipes.seo.site.semantic.clicks import Label
    from unisono.recipes.seo.site.semantic.results import Meaning
    from unisono.recipes.seo.site.semantic.rivals import Seen

FILES = ("report.html", "report.json", "findings.csv")
MAX_PAGES, MAX_QUERIES, MAX_GROUPS, MAX_OF_KIND = 5_000, 300, 300, 200
"""Largest numbers of entries that the HTML page shows; report.json contains all."""

REDIRECTS = "redirects.csv"
"""File with redirects, written if pages of an earlier version of the site were mapped to the new pages."""

_KIND = "seo"


@dataclass
class PageFindings:
    """The findings about one page."""

    name: str
    source: Path | str
    """The file or URL of the page."""
    title: str = ""
    num_words: int = 0
    checks: list[Check] = field(default_factory=list)
    unreadable: str = ""
    """The reason why the page could not be read; empty if it could."""
    score: float | None = None
    label: str = ""
    """The most likely class of the page."""
    best_queries: list[tuple[str, float]] = field(default_factory=list)
    seen: Seen | None = None
    """Clicks and position in Google."""

    @property
    def failed(self) -> list[Check]:
        """The failed checks."""
        return [check for check in self.checks if check.failed]

    def to_json(self) -> dict[str, Any]:
        """Returns the page's entry in report.json."""
        return {
            "page": self.name,
            "title": self.title,
            "words": self.num_words,
            "unreadable": self.unreadable or None,
            "score": None if self.score is None else round(self.score, 5),
            "label": self.label or None,
            "best_queries": [{"query": query, "score": round(score, 5)} for query, score in self.best_queries],
            **({"google": _seen_json(self.seen)} if self.seen else {}),
            "checks": [asdict(check) for check in self.checks],
        }


@dataclass
class Answer:
    """One of the best pages for a query."""

    page: int
    score: float
    bm25_rank: int | None
    """Rank by BM25, from 1; None if the page shares no word with the query."""
    seen: Seen | None = None
    """How often Google showed the page for the query."""


@dataclass
class DuplicateGroup:
    """Pages that duplicate each other."""

    kind: str
    pages: list[int]
    share: float = 1.0


@dataclass
class Findings:
    """Everything that a report shows."""

    site: str
    pages: list[PageFindings]
    duplicates: list[DuplicateGroup] = field(default_factory=list)
    queries: list[tuple[str, list[Answer]]] = field(default_factory=list)
    ranked_by: str = ""
    """Name of the model or method that ranks pages."""
    scored_by: str = ""
    """Name of the model that scores pages; empty without a model."""
    remarks: list[str] = field(default_factory=list)
    fetched: dict[str, int] = field(default_factory=dict)
    """Number of bytes fetched from each host."""
    technical: list[Finding] = field(default_factory=list)
    """Findings of the technical checks, worst first."""
    changes: Changes | None = None
    """Comparison with an earlier report."""
    meaning: Meaning | None = None
    """Comparison of the pages with each other."""
    seen_queries: dict[str, Seen] = field(default_factory=dict)
    """How often Google showed the site for each query."""
    labels: list[Label] = field(default_factory=list)
    """Pages that answer queries, judged by clicks."""

    def all_findings(self) -> list[Finding]:
        """Returns the findings of technical checks, page comparison and failed page checks, worst first."""
        # Skip the page check of broken links: the technical checks report each broken link.
        checked = [
            of_check(page.name, check) for page in self.pages for check in page.failed if check.name != "broken links"
        ]
        compared = self.meaning.findings() if self.meaning else []
        return worst_first([*self.technical, *compared, *checked])

    def to_json(self) -> dict[str, Any]:
        """Returns the content of report.json."""
        names = [page.name for page in self.pages]
        return {
            "site": self.site,
            "made_by": f"unisono {__version__}",
            "remarks": self.remarks,
            "fetched_bytes": self.fetched,
            "checks_are": "plain rules, not learned",
            "scored_by": self.scored_by or None,
            "ranked_by": self.ranked_by or None,
            "findings": [finding.to_json() for finding in self.all_findings()],
            "changes": self.changes.to_json() if self.changes else None,
            "meaning": self.meaning.to_json() if self.meaning else None,
            "pages": [page.to_json() for page in self.pages],
            "duplicates": [
                {"what": group.kind, "share": round(group.share, 3), "pages": [names[number] for number in group.pages]}
                for group in self.duplicates
            ],
            "queries": [
                {
                    "query": query,
                    **({"google": _seen_json(self.seen_queries[query])} if query in self.seen_queries else {}),
                    "pages": [
                        {
                            "page": names[each.page],
                            "score": round(each.score, 5),
                            "place_by_words": each.bm25_rank,
                            **({"google": _seen_json(each.seen)} if each.seen else {}),
                        }
                        for each in answers
                    ],
                }
                for query, answers in self.queries
            ],
        }


def _seen_json(seen: Seen) -> dict[str, float]:
    return {"clicks": seen.clicks, "impressions": seen.impressions, "position": round(seen.position, 2)}


def write_labels(file: Path, findings: Findings) -> None:
    """Writes the labels from clicks as a .jsonl for training the task `rank`, which ignores the weights."""
    assert findings.meaning is not None
    lines = [
        json.dumps(
            {
                "query": label.query,
                "positive": findings.meaning.texts[label.page],
                "weight": round(label.weight, 4),
                "page": findings.pages[label.page].name,
                **_seen_json(label.seen),
            },
            ensure_ascii=False,
        )
        for label in findings.labels
    ]
    write_cache_file(file, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))


def write_report(folder: Path, findings: Findings) -> Path:
    """Writes all files atomically; returns the path of the HTML page."""
    content = json.dumps(findings.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
    table = findings_csv(findings.all_findings())
    for name, text in zip(FILES, (html(findings, folder), content, table), strict=True):
        write_cache_file(folder / name, text.encode("utf-8", "replace"))
    if findings.meaning is not None and findings.meaning.moves:
        redirects = csv_of(("old", "new", "similarity", "bm25_rank"), findings.meaning.redirects())
        write_cache_file(folder / REDIRECTS, redirects.encode("utf-8", "replace"))
    return folder / FILES[0]


def is_report(content: bytes | str) -> bool:
    """Returns whether a page is a report of `unisono seo`: the site's folder may contain one."""
    mark = generator(_KIND)
    return mark in content[:500] if isinstance(content, str) else mark.encode() in content[:500]


def html(findings: Findings, folder: Path) -> str:
    """Returns the report's HTML page, with links relative to `folder`."""
    failed = _failed_checks(findings)
    ordered = _ordered(findings)
    scores = sorted(page.score for page in findings.pages if page.score is not None)
    severities = Counter(finding.severity for finding in findings.technical)
    num_unreadable = sum(bool(page.unreadable) for page in findings.pages)
    return render(
        Path(__file__).with_name("report.html"),
        kind=_KIND,
        title=f"{findings.site}: report",
        findings=findings,
        failed=failed,
        check_numbers={name: number for number, (name, _, _) in enumerate(failed)},
        pages=ordered[:MAX_PAGES],
        num_more_pages=max(0, len(ordered) - MAX_PAGES),
        queries=findings.queries[:MAX_QUERIES],
        num_more_queries=max(0, len(findings.queries) - MAX_QUERIES),
        groups=findings.duplicates[:MAX_GROUPS],
        num_more_groups=max(0, len(findings.duplicates) - MAX_GROUPS),
        kinds=_by_kind(findings.technical),
        meanings=_by_kind(findings.meaning.findings()) if findings.meaning else [],
        severities=[(name, number) for name in SEVERITIES if (number := severities[name])],
        changes=findings.changes,
        most=MAX_OF_KIND,
        num_failing=sum(bool(page.failed) for page in findings.pages),
        num_unreadable=num_unreadable,
        num_readable=max(1, len(findings.pages) - num_unreadable),
        median_score=scores[len(scores) // 2] if scores else None,
        link=lambda source: web_link(source) if isinstance(source, str) else relative_link(source, folder),
        version=__version__,
    )


def _by_kind(findings: list[Finding]) -> list[tuple[Finding, list[Finding]]]:
    """Groups findings by kind, worst first; returns the first finding and all findings of each kind."""
    kinds: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        kinds.setdefault((finding.severity, finding.kind), []).append(finding)
    ordered = sorted(kinds.items(), key=lambda item: (SEVERITIES.index(item[0][0]), -len(item[1]), item[0][1]))
    return [(found[0], found) for _, found in ordered]


def _failed_checks(findings: Findings) -> list[tuple[str, int, str]]:
    """Returns each failed check's name, number of pages and most common advice, sorted by number of pages."""
    advice: dict[str, Counter[str]] = {}
    for page in findings.pages:
        for name, text in {check.name: check.advice for check in page.failed}.items():
            advice.setdefault(name, Counter())[text] += 1
    counts = [(name, texts.total(), texts.most_common(1)[0][0]) for name, texts in advice.items()]
    return sorted(counts, key=lambda item: (-item[1], item[0]))


def _ordered(findings: Findings) -> list[PageFindings]:
    """Sorts pages by score, best first; without scores, unreadable pages first, then by number of failed checks."""
    if findings.scored_by:
        return sorted(findings.pages, key=lambda page: (page.score is None, -(page.score or 0.0), page.name))
    return sorted(findings.pages, key=lambda page: (-bool(page.unreadable), -len(page.failed), page.name))
