"""The results of comparing pages: entries for report.json, and findings with evidence and fix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from unisono.recipes.seo.site.finding import Finding, worst_first
from unisono.recipes.seo.site.semantic.duplicates import Duplicate
from unisono.recipes.seo.site.semantic.links import Link
from unisono.recipes.seo.site.semantic.moves import Move
from unisono.recipes.seo.site.semantic.rivals import Contest, Rival
from unisono.recipes.seo.site.semantic.strays import Stray
from unisono.recipes.seo.site.semantic.topics import Topic

DUPLICATE, STRAY, CONTEST, LINK = "same content in other words", "off-topic page", "competing pages", "missing link"
UNREACHABLE, TOPIC, REDIRECT, GONE = "unreachable page", "topic", "missing redirect", "old page without a successor"


@dataclass(frozen=True)
class Unreachable:
    """A page that cannot be reached by links from the start page, and the pages that should link to it."""

    page: int
    related: list[tuple[int, float, float]]
    """Page, cosine and BM25 cosine of the related pages, most similar first."""


@dataclass
class Meaning:
    """All results of the comparison; pages are identified by number."""

    encoder: str
    """Name of the encoder, or BM25."""
    names: list[str]
    duplicates: list[tuple[Duplicate, float]] = field(default_factory=list)
    """Each with the BM25 cosine of its pages, as in the following lists of pairs."""
    strays: list[tuple[Stray, float]] = field(default_factory=list)
    contests: list[Contest] = field(default_factory=list)
    links: list[tuple[Link, float]] = field(default_factory=list)
    unreachable: list[Unreachable] = field(default_factory=list)
    topics: list[tuple[Topic, int]] = field(default_factory=list)
    """Each with the number of its pages that link to its hub."""
    moves: list[Move] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)
    """Maps each duplicate to the page to keep."""
    num_same_address: int = 0
    """Number of old pages whose URL still exists."""
    new_urls: dict[int, str] = field(default_factory=dict)
    """URL of each page, for redirects."""
    remarks: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Title and main text of each page, for writing labels."""

    def findings(self) -> list[Finding]:
        """Returns all findings, worst first."""
        return worst_first(
            Finding(each.kind, each.severity, each.page, each.evidence[:400], each.fix, each.subject)
            for each in self._findings()
        )

    def _findings(self) -> Iterator[Finding]:
        names = self.names
        for duplicate, bm25 in self.duplicates:
            one, other = duplicate.page, duplicate.other
            keep, drop = (one, other) if self.kept.get(other) == one or one not in self.kept else (other, one)
            evidence = (
                f"{100 * duplicate.share:.0f} % of the sentences have a counterpart in {names[keep]} "
                f"(similarity {duplicate.cosine:.2f}, BM25 {bm25:.2f})"
            )
            fix = f"Keep {names[keep]} and redirect this page to it, or declare it as canonical here."
            yield Finding(DUPLICATE, "warning", names[drop], evidence, fix, names[keep])
        for stray, bm25 in self.strays:
            evidence = (
                f"similarity with its nearest pages {stray.nearest:.2f}, usually {stray.usual:.2f} (BM25 {bm25:.2f})"
            )
            fix = (
                "Check that the page belongs here: it may be spam from an intrusion, or better placed on another site."
            )
            yield Finding(STRAY, "warning", names[stray.page], evidence, fix)
        for contest in self.contests:
            best, *others = contest.rivals
            evidence = f"“{contest.query}”: " + "; ".join(self._shown(rival) for rival in contest.rivals)
            for rival in others:
                fix = f"Let {names[best.page]} answer this query: merge the pages, or give this one another focus."
                severity = "warning" if contest.is_measured else "notice"
                yield Finding(CONTEST, severity, names[rival.page], evidence, fix, contest.query)
        for link, bm25 in self.links:
            beside = f"similarity of the pages {link.cosine:.2f}, BM25 {bm25:.2f}"
            evidence = f"mentions “{link.anchor}” ({beside}): {link.sentence}"
            fix = f"Link “{link.anchor}” to {names[link.target]}."
            yield Finding(LINK, "notice", names[link.source], evidence, fix, names[link.target])
        for page in self.unreachable:
            related = "; ".join(f"{names[each]} ({cosine:.2f}, BM25 {bm25:.2f})" for each, cosine, bm25 in page.related)
            evidence = "no links lead here from the start page" + (f"; related pages: {related}" if related else "")
            fix = f"Link to it from {names[page.related[0][0]]}." if page.related else "Link to it, or remove it."
            yield Finding(UNREACHABLE, "warning", names[page.page], evidence, fix)
        for topic, num_links in self.topics:
            evidence = (
                f"{topic.label}: {len(topic.pages):,} pages, of which {num_links:,} link to this page, the most "
                "central one"
            )
            fix = "If it is the topic's main page, link to it from the others."
            yield Finding(TOPIC, "notice", names[topic.hub], evidence, fix)
        for move in self.moves:
            if move.new is None:
                evidence = f"not on the new site; the nearest page has a similarity of only {move.score:.2f}"
                yield Finding(
                    GONE, "notice", move.old, evidence, "Answer 410, or redirect to a page that helps visitors."
                )
                continue
            evidence = (
                f"not on the new site; {names[move.new]} has a similarity of {move.score:.2f}, {move.margin:.2f} more "
                f"than the next page (BM25 rank {move.bm25_rank})"
            )
            fix = f"Redirect: /{move.old.lstrip('/')} {self.new_urls.get(move.new, names[move.new])} 301"
            yield Finding(REDIRECT, "warning", move.old, evidence, fix)

    def _shown(self, rival: Rival) -> str:
        parts = [f"{rival.score:.2f}", f"BM25 rank {rival.bm25_rank}" if rival.bm25_rank else "not found by BM25"]
        if rival.seen is not None:
            seen = rival.seen
            parts.append(f"position {seen.position:.1f}, {seen.clicks:,.0f} of {seen.impressions:,.0f} clicked")
        return f"{self.names[rival.page]} ({', '.join(parts)})"

    def redirects(self) -> list[tuple[str, str, float, int]]:
        """Returns the old path, new URL, score and BM25 rank of each redirect."""
        return [
            (f"/{move.old.lstrip('/')}", self.new_urls[move.new], round(move.score, 4), move.bm25_rank)
            for move in self.moves
            if move.new is not None
        ]

    def to_json(self) -> dict[str, Any]:
        """Returns the entry in report.json."""
        names = self.names
        return {
            "encoder": self.encoder,
            "near_duplicates": [
                {
                    "pages": [names[each.page], names[each.other]],
                    "similarity": round(each.cosine, 4),
                    "share": round(each.share, 4),
                    "bm25": round(bm25, 4),
                }
                for each, bm25 in self.duplicates
            ],
            "off_topic": [
                {
                    "page": names[each.page],
                    "similarity": round(each.nearest, 4),
                    "usual": round(each.usual, 4),
                    "bm25": round(bm25, 4),
                }
                for each, bm25 in self.strays
            ],
            "competing": [
                {
                    "query": contest.query,
                    "measured": contest.is_measured,
                    "pages": [self._rival_json(rival) for rival in contest.rivals],
                }
                for contest in self.contests
            ],
            "missing_links": [
                {
                    "page": names[each.source],
                    "target": names[each.target],
                    "anchor": each.anchor,
                    "sentence": each.sentence[:300],
                    "similarity": round(each.cosine, 4),
                    "bm25": round(bm25, 4),
                }
                for each, bm25 in self.links
            ],
            "unreachable": [
                {
                    "page": names[each.page],
                    "related": [
                        {"page": names[other], "similarity": round(cosine, 4), "bm25": round(bm25, 4)}
                        for other, cosine, bm25 in each.related
                    ],
                }
                for each in self.unreachable
            ],
            "topics": [
                {
                    "label": topic.label,
                    "hub": names[topic.hub],
                    "links_to_hub": number,
                    "similarity": round(topic.cosine, 4),
                    "pages": [names[page] for page in topic.pages],
                }
                for topic, number in self.topics
            ],
            "redirects": [
                {
                    "old": move.old,
                    "new": None if move.new is None else names[move.new],
                    "similarity": round(move.score, 4),
                    "margin": round(move.margin, 4),
                    "bm25_rank": move.bm25_rank,
                }
                for move in self.moves
            ],
        }

    def _rival_json(self, rival: Rival) -> dict[str, Any]:
        seen = rival.seen
        return {
            "page": self.names[rival.page],
            "score": round(rival.score, 4),
            "bm25_rank": rival.bm25_rank,
            "clicks": None if seen is None else seen.clicks,
            "impressions": None if seen is None else seen.impressions,
            "position": None if seen is None else round(seen.position, 2),
        }
