"""Maps the pages of a site's old version to pages of its new version.

A site has many pages about the same subject, so the most similar page may be the wrong one. The sentences decide: a
page has moved if many of its sentences have counterparts in the new page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unisono.recipes.seo.site.semantic.contents import Content
from unisono.recipes.seo.site.semantic.duplicates import Sentences
from unisono.recipes.seo.site.semantic.space import Meaning, Vectors

_CANDIDATES = 5
_SAME_TITLE = 0.9


@dataclass(frozen=True)
class Move:
    """An old page and the new page that it should redirect to."""

    old: str
    new: int | None
    """None if the new site has no such page."""
    score: float
    """Mean of the similarity of both pages and the fraction of the old page's text with a counterpart."""
    margin: float
    """Difference between the scores of this page and the second-best page."""
    bm25_rank: int
    """Rank of the new page by BM25, from 1."""


def moves(
    old_names: Sequence[str],
    old: Sequence[Content],
    new: Sequence[Content],
    among: Sequence[int],
    texts: Vectors,
    titles: Vectors,
    meaning: Meaning,
    bm25: tuple[Vectors, Vectors],
) -> list[Move]:
    """Finds the new page for each old page. `bm25` are the BM25 vectors of the old pages and of the pages `among`."""
    if not len(among) or not old:
        return []
    old_texts, old_titles = meaning.embed([each.text for each in old]), meaning.embed([each.title for each in old])
    limits, candidates, scored = meaning.limits, list[list[int]](), list[list[float]]()
    titled, ranks = list[list[float]](), list[list[int]]()
    by_text, by_title = old_texts.blocks(texts.take(among)), old_titles.blocks(titles.take(among))
    by_words = bm25[0].blocks(bm25[1])
    for (_, text_block), (_, title_block), (_, word_block) in zip(by_text, by_title, by_words, strict=True):
        # A page keeps its words when it moves, so the BM25 similarity counts too.
        scores = limits.by_text * text_block + limits.by_title * title_block + limits.by_words * word_block
        scores /= limits.by_text + limits.by_title + limits.by_words
        order = np.argsort(-scores, axis=1, kind="stable")[:, :_CANDIDATES]
        candidates += [[among[column] for column in row] for row in order.tolist()]
        scored += np.take_along_axis(scores, order, axis=1).tolist()
        titled += np.take_along_axis(title_block, order, axis=1).tolist()
        words = np.take_along_axis(word_block, order, axis=1)
        ranks += [[1 + int((row > value).sum()) for value in some] for row, some in zip(word_block, words, strict=True)]
    sentences = Sentences(
        [*old, *new],
        [*range(len(old)), *sorted({len(old) + page for pages in candidates for page in pages})],
        meaning,
    )
    found = []
    for number, pages in enumerate(candidates):
        shares = sentences.shares(number, [len(old) + page for page in pages])
        totals = [score + share for score, share in zip(scored[number], shares, strict=True)]
        best = int(np.argmax(totals))
        is_same = totals[best] / 2 >= limits.moved or (
            not old[number].sentences and titled[number][best] >= _SAME_TITLE
        )
        rest = [total for place, total in enumerate(totals) if place != best]
        margin = (totals[best] - max(rest, default=0.0)) / 2
        page = pages[best] if is_same else None
        found.append(Move(old_names[number], page, totals[best] / 2, margin, ranks[number][best]))
    return found
