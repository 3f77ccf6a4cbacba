"""Finds queries for which several pages of a site compete (keyword cannibalisation).

A page competes for a query if its title and text are about as close to the query as the title and text of the best
page. If there is Search Console data, pages that Google showed for the same query compete, whatever a model says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from unisono.recipes.seo.site.semantic.contents import Content
from unisono.recipes.seo.site.semantic.space import Meaning, Vectors

_MOST = 5  # maximum number of pages per query
_MIN_SHOWN, _MIN_SHARE, _LAST_POSITION = 10, 0.1, 40.0


@dataclass(frozen=True)
class Seen:
    """How often a page was shown and clicked for a query."""

    clicks: float
    impressions: float
    position: float


@dataclass(frozen=True)
class Rival:
    """A page that competes for a query."""

    page: int
    score: float
    """Mean of two cosines: of the query with the page's title and with its text."""
    bm25_rank: int | None
    seen: Seen | None = None


@dataclass
class Contest:
    """A query and the pages that compete for it, best first."""

    query: str
    rivals: list[Rival] = field(default_factory=list)
    is_measured: bool = False
    """Whether Search Console shows that the pages compete."""


def contests(
    queries: Sequence[str],
    contents: Sequence[Content],
    texts: Vectors,
    titles: Vectors,
    among: Sequence[int],
    meaning: Meaning,
    bm25_ranks: Mapping[str, Mapping[int, int]],
    seen: Mapping[str, Mapping[int, Seen]] | None = None,
    same: Mapping[int, int] | None = None,
) -> list[Contest]:
    """Returns the contested queries. `same` maps a duplicate to the page that competes in its place."""
    chosen, found, seen, same = np.asarray(among, np.int64), list[Contest](), seen or {}, same or {}
    if not len(chosen):
        return []
    asked = meaning.embed(queries, "query")
    by_title = asked.blocks(titles.take(chosen))
    by_text = asked.blocks(texts.take(chosen))
    allowed = set(chosen.tolist())
    for (start, title_block), (_, text_block) in zip(by_title, by_text, strict=True):
        scores = (title_block + text_block) / 2
        for row in range(len(scores)):
            query = queries[start + row]
            shown = {page: each for page, each in seen.get(query, {}).items() if page in allowed}
            measured = _measured(shown)
            order = np.argsort(-scores[row], kind="stable")[: 4 * _MOST]
            best, limits = float(scores[row, order[0]]), meaning.limits
            pages: list[int] = []
            if best >= limits.answer and not measured:
                near = (scores[row, order] >= limits.as_good * best) & (title_block[row, order] >= limits.titled)
                pages = chosen[order[near]].tolist()
            pages = list(dict.fromkeys(same.get(page, page) for page in [*measured, *pages]))
            if len(pages) < 2:
                continue
            place = {int(page): column for column, page in enumerate(chosen.tolist())}
            rivals = [
                Rival(page, float(scores[row, place[page]]), bm25_ranks.get(query, {}).get(page), shown.get(page))
                for page in pages[:_MOST]
            ]
            rivals.sort(key=lambda each: (-(each.seen.clicks if each.seen else 0.0), -each.score, each.page))
            found.append(Contest(query, rivals, len(measured) > 1))
    return found


def _measured(shown: Mapping[int, Seen]) -> list[int]:
    """Returns the pages that Google showed for a query often enough; empty if there is only one."""
    total = sum(each.impressions for each in shown.values())
    pages = [
        page
        for page, each in sorted(shown.items(), key=lambda item: -item[1].impressions)
        if each.impressions >= max(_MIN_SHOWN, _MIN_SHARE * total) and each.position <= _LAST_POSITION
    ]
    return pages if len(pages) > 1 else []
