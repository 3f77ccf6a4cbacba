"""Finds pages that say the same thing in different words.

Pages about the same subject are similar as a whole, even if they say different things about it. The nearest pages are
therefore only candidates, and their sentences decide: two pages are duplicates if most sentences of each page have
their counterpart in the other page, and not in further similar pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unisono.recipes.seo.site.semantic.contents import Content
from unisono.recipes.seo.site.semantic.space import Floats, Meaning, Vectors

_CANDIDATES = 6  # nearest pages whose sentences are compared
_MAX_SENTENCES = 40  # maximum number of sentences per page to compare
_MIN_SENTENCES = 3
_COMMON = 4  # a sentence on at least this many pages does not count
_TIE = 0.03
_BELOW, _ABOVE = 0.1, 0.15  # around the limit, a counterpart counts in part


@dataclass(frozen=True)
class Duplicate:
    """Two pages with the same content."""

    page: int
    other: int
    cosine: float
    share: float
    """Fraction of a page's text with a counterpart in the other page; the smaller fraction of the two pages."""


def near_duplicates(
    contents: Sequence[Content], pages: Vectors, among: Sequence[int], meaning: Meaning
) -> list[Duplicate]:
    """Returns the duplicates among the pages in `among`, most similar first."""
    limits = meaning.limits
    chosen = [page for page in among if len(contents[page].sentences) >= _MIN_SENTENCES]
    numbers, cosines = pages.take(chosen).nearest(pages.take(chosen), _CANDIDATES, is_same=True)
    pairs: dict[tuple[int, int], float] = {}
    for row, (near, values) in enumerate(zip(numbers.tolist(), cosines.tolist(), strict=True)):
        for other, cosine in zip(near, values, strict=True):
            if cosine >= limits.candidate:
                pairs[chosen[min(row, other)], chosen[max(row, other)]] = cosine
    sentences = Sentences(contents, sorted({page for pair in pairs for page in pair}), meaning)
    partners: dict[int, list[int]] = {}
    for one, other in pairs:
        partners.setdefault(one, []).append(other)
        partners.setdefault(other, []).append(one)
    shares = {
        (page, other): share
        for page, others in partners.items()
        for other, share in zip(others, sentences.shares(page, others), strict=True)
    }
    found = []
    for (one, other), cosine in pairs.items():
        share = min(shares[one, other], shares[other, one])
        if share >= limits.shared:
            found.append(Duplicate(one, other, cosine, share))
    return sorted(found, key=lambda each: (-each.share, -each.cosine, each.page, each.other))


class Sentences:
    """Sentence vectors of some pages."""

    def __init__(self, contents: Sequence[Content], pages: Sequence[int], meaning: Meaning) -> None:
        self._limit = meaning.limits.same_sentence
        counts = Counter(sentence for content in contents for sentence in set(content.sentences))
        texts, self._slices, self._weights = list[str](), dict[int, slice](), dict[int, Floats]()
        for page in pages:
            own = contents[page].sentences[:_MAX_SENTENCES]
            self._slices[page] = slice(len(texts), len(texts) + len(own))
            lengths = np.array([len(sentence.split()) for sentence in own], np.float32)
            # Ignore sentences that several pages contain word for word, unless the page has no others.
            rare = np.array([counts[sentence] < _COMMON for sentence in own], bool)
            self._weights[page] = lengths * rare if rare.any() else lengths
            texts += own
        self._vectors = meaning.embed(texts)

    def shares(self, page: int, others: Sequence[int]) -> list[float]:
        """Returns for each other page the fraction of `page`'s words that are in sentences with a counterpart there.

        Sentences about the same subject are all similar. A counterpart must therefore be the most similar sentence in
        all of the other pages, or nearly so.
        """
        own, weights = Vectors(self._vectors.rows[self._slices[page]]), self._weights[page]
        if not len(weights):
            return [0.0] * len(others)
        near = [
            own.matrix(Vectors(self._vectors.rows[self._slices[other]])).max(axis=1, initial=-1.0) for other in others
        ]
        best = np.max(near, axis=0, initial=-1.0) - _TIE
        start, end = self._limit - _BELOW, self._limit + _ABOVE
        total = max(1.0, float(weights.sum()))
        return [
            float((weights * (each >= best) * np.clip((each - start) / (end - start), 0.0, 1.0)).sum()) / total
            for each in near
        ]
