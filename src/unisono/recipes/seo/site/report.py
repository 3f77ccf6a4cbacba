"""The report of a site: one HTML page to look at, and the same as JSON.

The page asks nothing of the network, and whatever comes from a page of the site (titles above all) is only ever text in
it. What rules found and what a model says stand in different places: one is not the other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from unisono import __version__
from unisono.recipes.common.cache_files import write_cache_file
from unisono.recipes.common.html_page import csp_hash, relative_link
from unisono.recipes.seo.site.text_rules import Check

FILES = ("report.html", "report.json")
MOST_SHOWN, MOST_QUERIES, MOST_GROUPS = 5_000, 300, 300
"""Pages, queries and groups of duplicates on the page; report.json has all."""

_GENERATOR = "unisono seo"
_HERE = Path(__file__).parent


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
    told = json.dumps(as_json(findings), indent=1, ensure_ascii=False, allow_nan=False)
    for name, content in zip(FILES, (html(findings, folder), told), strict=True):
        write_cache_file(folder / name, content.encode("utf-8", "replace"))
    return folder / FILES[0]


def is_report(content: bytes | str) -> bool:
    """Whether a page is a report of ours, which may lie among the pages of a site."""
    mark = f'<meta name="generator" content="{_GENERATOR}">'
    return mark in content[:500] if isinstance(content, str) else mark.encode() in content[:500]


def html(findings: Findings, folder: Path) -> str:
    """The page, with links relative to the folder it will be in."""
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    name = _text(findings.site)
    sections = [_tiles(findings), _checks(findings), _pages(findings, folder)]
    sections += [_queries(findings)] if findings.queries else []
    sections.append(_repeats(findings))
    remarks = "".join(f"<li>{_text(remark)}</li>" for remark in findings.remarks)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="{_GENERATOR}">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; base-uri 'none'; form-action 'none'; \
style-src '{csp_hash(style)}'; script-src '{csp_hash(script)}'">
<title>{name}: report</title><style>{style}</style></head><body><main>
<header><p class="brand">unisono <span>seo</span></p><h1>{name}</h1>
{f'<ul class="remarks">{remarks}</ul>' if remarks else ""}</header>
{"".join(sections)}
<footer>Made by unisono {escape(__version__)}. report.json beside this page has everything in it.</footer>
</main><script>{script}</script></body></html>
"""


def _tiles(findings: Findings) -> str:
    pages = findings.pages
    unread = sum(bool(page.unreadable) for page in pages)
    tiles = [("pages", f"{len(pages):,}"), ("with a failed check", f"{sum(bool(page.failed) for page in pages):,}")]
    tiles += [("could not be read", f"{unread:,}")] if unread else []
    tiles += [("groups of duplicates", f"{len(findings.repeats):,}")]
    scores = [page.score for page in pages if page.score is not None]
    if scores:
        tiles.append(("middle score (learned)", f"{sorted(scores)[len(scores) // 2]:.3f}"))
    tiles += [("queries", f"{len(findings.queries):,}")] if findings.queries else []
    return f'<ul class="tiles">{"".join(f"<li><b>{value}</b><span>{what}</span></li>" for what, value in tiles)}</ul>'


def _failed_names(findings: Findings) -> list[tuple[str, int]]:
    """The checks that failed somewhere, most often first."""
    counts = Counter(name for page in findings.pages for name in {check.name for check in page.failed})
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _checks(findings: Findings) -> str:
    read = max(1, sum(not page.unreadable for page in findings.pages))
    advice: dict[str, Counter[str]] = {}
    for page in findings.pages:
        for check in page.failed:
            advice.setdefault(check.name, Counter())[check.advice] += 1
    items = [
        f'<li><button type="button" class="pick" data-check="{number}" aria-pressed="false">'
        f'<span class="what">{_text(name)}</span><span class="count">{count:,}</span></button>'
        f'<meter min="0" max="{read}" value="{count}">{count} of {read}</meter>'
        f"<p>{_text(advice[name].most_common(1)[0][0])}</p></li>"
        for number, (name, count) in enumerate(_failed_names(findings))
    ]
    body = f'<ul class="checks">{"".join(items)}</ul>' if items else '<p class="note">Every check is passed.</p>'
    note = "Plain rules over the HTML; nothing here is learned, and no score is made of it."
    return f'<section><h2>Checks that fail</h2><p class="note">{note}</p>{body}</section>'


def _pages(findings: Findings, folder: Path) -> str:
    failed = _failed_names(findings)
    numbers = {name: number for number, (name, _) in enumerate(failed)}
    has_scores = bool(findings.scored_by)
    if has_scores:
        order = sorted(findings.pages, key=lambda page: (page.score is None, -(page.score or 0.0), page.name))
    else:
        order = sorted(findings.pages, key=lambda page: (-bool(page.unreadable), -len(page.failed), page.name))
    rows = "".join(_row(page, numbers, folder, has_scores) for page in order[:MOST_SHOWN])
    columns = ["page", *(["score"] if has_scores else []), "words", "failed"]
    heads = "".join(
        f'<th scope="col" class="{name}" aria-sort="none"><button type="button" data-sort="{name}">'
        f"{'score (learned)' if name == 'score' else name}</button></th>"
        for name in columns
    )
    picks = "".join(f'<option value="{numbers[name]}">{_text(name)} ({count:,})</option>' for name, count in failed)
    sorts = "".join(f'<option value="{name}">{name}</option>' for name in columns)
    notes = [f"Scores: {findings.scored_by}, best first."] if has_scores else []
    left = len(order) - MOST_SHOWN
    notes += [f"{left:,} more pages are in report.json."] if left > 0 else []
    return f"""<section><h2 id="pages">Pages</h2>{"".join(f'<p class="note">{_text(note)}</p>' for note in notes)}
<div class="tools" hidden><label>Find <input type="search" id="find" placeholder="title or name"></label>
<label>Failed check <select id="check"><option value="">any page</option>{picks}</select></label>
<label class="narrow">Sort by <select id="sort">{sorts}</select></label><output id="shown"></output></div>
<div class="card"><table id="table"><thead><tr>{heads}<th scope="col" class="found">what was found</th></tr></thead>
<tbody>{rows}</tbody></table></div></section>"""


def _row(page: PageFindings, numbers: dict[str, int], folder: Path, has_scores: bool) -> str:
    failed = page.failed
    title = _text(page.title.strip()) or "<i>no title</i>"
    link = _link(page.place, folder)
    name = f'<a href="{link}">{_text(page.name)}</a>' if link else _text(page.name)
    found = "".join(f"<li><b>{_text(check.name)}</b> {_text(check.found)}</li>" for check in failed)
    found = f'<ul class="found">{found}</ul>' if found else ""
    if page.unreadable:
        found = f'<p class="bad">{_text(page.unreadable)}</p>'
    if page.best_queries:
        best = ", ".join(f"{_text(query)} <small>{score:.3f}</small>" for query, score in page.best_queries)
        found += f'<p class="best"><span>best queries</span> {best}</p>'
    score = ""
    if has_scores:
        value = "" if page.score is None else f"{page.score:.6g}"
        shown = "–" if page.score is None else f"{page.score:.3f}"
        label = f"<small>likeliest: {_text(page.label)}</small>" if page.label else ""
        score = f'<td class="score" data-value="{value}">{shown}{label}</td>'
    marks = " ".join(str(numbers[check.name]) for check in failed)
    return (
        f'<tr data-checks="{marks}"><td class="page"><div class="title">{title}</div>'
        f'<div class="name">{name}</div></td>{score}<td class="words" data-value="{page.num_words}">'
        f'{page.num_words:,}</td><td class="failed" data-value="{"" if page.unreadable else len(failed)}">'
        f'{len(failed) if failed else "–" if page.unreadable else "✓"}</td><td class="found">{found}</td></tr>\n'
    )


def _queries(findings: Findings) -> str:
    def cards() -> Iterator[str]:
        for query, answers in findings.queries[:MOST_QUERIES]:
            rows = "".join(
                f"<li><span>{_text(findings.pages[answer.page].title.strip() or findings.pages[answer.page].name)}"
                f'<small class="name">{_text(findings.pages[answer.page].name)}</small></span>'
                f'<span class="number">{answer.score:.3f}</span>'
                f'<span class="number">{answer.place_by_words or "–"}</span></li>'
                for answer in answers
            )
            head = '<li class="head"><span>page</span><span class="number">score</span><span>by words</span></li>'
            none = '<p class="note">No page fits.</p>'
            body = f"<ol>{head}{rows}</ol>" if answers else none
            yield f'<article class="card query"><h3>{_text(query)}</h3>{body}</article>'

    note = f"In the order of {findings.ranked_by}. “By words” is the place that BM25 gives the page, without any model."
    left = len(findings.queries) - MOST_QUERIES
    note += f" {left:,} more queries are in report.json." if left > 0 else ""
    return (
        f'<section><h2>Queries and their pages</h2><p class="note">{_text(note)}</p>'
        f'<div class="queries">{"".join(cards())}</div></section>'
    )


def _repeats(findings: Findings) -> str:
    def items(pages: Sequence[int]) -> str:
        shown = "".join(f"<li>{_text(findings.pages[number].name)}</li>" for number in pages[:20])
        return shown + (f"<li>and {len(pages) - 20:,} more</li>" if len(pages) > 20 else "")

    cards = "".join(
        f'<article class="card"><h3>{_text(repeat.what)}'
        f"{f' <small>about {repeat.share:.0%} shared</small>' if repeat.share < 1 else ''}</h3>"
        f"<ul>{items(repeat.pages)}</ul></article>"
        for repeat in findings.repeats[:MOST_GROUPS]
    )
    more = len(findings.repeats) - MOST_GROUPS
    cards += f'<p class="note">{more:,} more groups are in report.json.</p>' if more > 0 else ""
    body = f'<div class="repeats">{cards}</div>' if cards else '<p class="note">No page repeats another.</p>'
    return f"<section><h2>Duplicate pages</h2>{body}</section>"


def _text(text: str) -> str:
    """Text for HTML: nothing in it is markup, and signs that cannot be printed are shown as such."""
    return escape("".join(sign if sign.isprintable() else " " if sign.isspace() else "�" for sign in text))


def _link(place: Path | str, folder: Path) -> str:
    """Where a page is opened: its web address, or its file relative to the report."""
    if isinstance(place, str):
        web = place.lower().startswith(("http://", "https://"))
        return quote(place, safe="%/:=&?~+!$,;'@()*[]#").replace("&", "&amp;").replace("'", "%27") if web else ""
    return relative_link(place, folder)
