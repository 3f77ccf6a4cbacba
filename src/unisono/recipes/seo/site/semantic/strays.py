"""Finds off-topic pages, which are about something other than the rest of the site."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unisono.recipes.seo.site.semantic.contents import Content
from unisono.recipes.seo.site.semantic.space import Vectors

_MIN_SITE, _MIN_WORDS = 12, 20
# Number of neighbours to compare a page with: a few spam pages must not vouch for each other.
_NEAR, _NEAR_SHARE = 6, 0.03
_DEVIATIONS, _FRACTION = 3.0, 0.62
_USUAL = re.compile(
    r"contact|imprint|impressum|kontakt|privacy|datenschutz|terms|agb|legal|cookie|about|ueber|über|login|signin|account|"
    r"cart|checkout|search|404|jobs|careers|press|faq|help|archive|tag|author",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Stray:
    """An off-topic page."""

    page: int
    nearest: float
    """Mean cosine with its neighbours, except the nearest half of them."""
    usual: float
    """Median of `nearest` over the pages of the site."""


def strays(contents: Sequence[Content], names: Sequence[str], pages: Vectors, among: Sequence[int]) -> list[Stray]:
    """Returns the pages of `among` whose neighbours are much farther away than usual, farthest first."""
    chosen = [page for page in among if sum(len(each.split()) for each in contents[page].sentences) >= _MIN_WORDS]
    if len(chosen) < _MIN_SITE:
        return []
    some = pages.take(chosen)
    number = max(_NEAR, int(_NEAR_SHARE * len(chosen)))
    _, cosines = some.nearest(some, number, is_same=True)
    near = cosines[:, number // 2 :].mean(axis=1)
    usual = float(np.median(near))
    spread = 1.4826 * float(np.median(np.abs(near - usual)))
    limit = min(usual - _DEVIATIONS * spread, _FRACTION * usual)
    return [
        Stray(chosen[row], float(near[row]), usual)
        for row in np.argsort(near, kind="stable").tolist()
        if near[row] < limit and not _is_usual(names[chosen[row]], contents[chosen[row]].title)
    ]


def _is_usual(name: str, title: str) -> bool:
    """Returns whether most sites have such a page, for example a contact page."""
    return bool(_USUAL.search(name.rpartition("/")[2]) or (len(title.split()) <= 3 and _USUAL.search(title)))
