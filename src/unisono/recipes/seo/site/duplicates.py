"""Finds pages of a site with the same title or description, or with the same or nearly the same text.

About three kilobytes per page stay in memory. Near duplicates are found by MinHash and locality-sensitive hashing
(datasketch): the estimated share of common five-word shingles is accurate to about 0.02.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.seo.site.text_rules import words_of

if TYPE_CHECKING:
    from unisono.recipes.seo.data.pages import Page

NEAR_DUPLICATE = 0.8
"""Texts with at least this fraction of shingles in common are nearly the same."""

_SHINGLE = 5  # words
_BANDS, _ROWS = (
    32,
    8,
)  # with 80 % of shingles in common, two texts collide with a probability of 99.7 %; with 50 %, rarely


class Duplicates:
    """Collects pages and groups duplicates. Pages are numbered from 0 in the order of the calls of `add`."""

    def __init__(self) -> None:
        self._titles: dict[bytes, list[int]] = defaultdict(list)
        self._descriptions: dict[bytes, list[int]] = defaultdict(list)
        self._texts: dict[bytes, list[int]] = defaultdict(list)
        self._canonical: list[str] = []
        self._minhashes: dict[int, Any] = {}

    def add(self, page: Page) -> None:
        """Adds the next page."""
        number = len(self._canonical)
        self._canonical.append((page.canonical or "").strip())
        for pages_with, text in ((self._titles, page.title), (self._descriptions, page.description)):
            if text and text.strip():
                pages_with[_digest(" ".join(text.casefold().split()))].append(number)
        words = words_of(page.text)
        if words:
            same_text = self._texts[_digest(" ".join(words))]
            if not same_text and len(words) >= _SHINGLE:
                self._minhashes[number] = _minhash(words)
            same_text.append(number)

    def same_titles(self) -> list[list[int]]:
        """Returns groups of pages with the same title."""
        return self._without_declared(self._titles.values())

    def same_descriptions(self) -> list[list[int]]:
        """Returns groups of pages with the same description."""
        return self._without_declared(self._descriptions.values())

    def same_texts(self) -> list[list[int]]:
        """Returns groups of pages with the same words."""
        return self._without_declared(self._texts.values())

    def near_duplicates(self) -> list[tuple[list[int], float]]:
        """Returns groups of nearly the same text, with the least fraction of shingles in common with the first page."""
        from datasketch import MinHashLSH

        groups: dict[int, list[int]] = {}  # groups, by their first page
        first_pages = MinHashLSH(num_perm=_BANDS * _ROWS, params=(_BANDS, _ROWS))
        for number, minhash in self._minhashes.items():
            candidates = sorted(first_pages.query(minhash))
            shares = self._shares(minhash, candidates)
            if candidates and shares.max() >= NEAR_DUPLICATE:
                groups[candidates[int(shares.argmax())]].append(number)
            else:
                groups[number] = [number]
                first_pages.insert(number, minhash)
        return [
            (group, float(self._shares(self._minhashes[group[0]], group[1:]).min()))
            for group in self._without_declared(groups.values())
        ]

    def _shares(self, minhash: Any, others: Sequence[int]) -> NDArray[np.float64]:
        """Estimates the fraction of shingles that a text has in common with each of the other texts."""
        values = [self._minhashes[other].hashvalues for other in others]
        return (np.stack(values) == minhash.hashvalues).mean(axis=1) if values else np.empty(0)

    def _without_declared(self, groups: Iterable[list[int]]) -> list[list[int]]:
        """Returns groups of at least two pages; pages with the same canonical URL count as one page."""
        undeclared = []
        for group in groups:
            first_of = {self._canonical[number] or number: number for number in reversed(group)}
            if len(first_of) > 1:
                undeclared.append(sorted(first_of.values()))
        return sorted(undeclared)


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()


def _minhash(words: Sequence[str]) -> Any:
    from datasketch import MinHash

    minhash = MinHash(num_perm=_BANDS * _ROWS, seed=0)
    starts = range(len(words) - _SHINGLE + 1)
    for first in range(0, len(starts), 4096):  # limits memory use for very long pages
        some = starts[first : first + 4096]
        minhash.update_batch([" ".join(words[start : start + _SHINGLE]).encode("utf-8", "replace") for start in some])
    return minhash
