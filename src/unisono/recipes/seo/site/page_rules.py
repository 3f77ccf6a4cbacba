"""The checks of a page: plain rules over its HTML, and over the pages of a site that repeat each other.

Every rule is deterministic and says what it found and what to do. None is learned, and none is mixed with a model's
score. Of a site about a kilobyte is kept for each page, so thousands of pages are no matter.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from unisono.formatting import format_count
from unisono.recipes.seo.site.text_rules import (
    FIRST_WORDS,
    Check,
    first_words,
    length_check,
    readability_check,
    repeated,
    share_of,
    share_text,
    stands_in,
    words_of,
)

if TYPE_CHECKING:
    from unisono.recipes.seo.data.pages import Page

LONGEST_TITLE, LONGEST_DESCRIPTION = 60, 155
"""Characters; search engines cut what is longer."""

ALIKE = 0.8
"""Pages are nearly the same when they share this much of their runs of five words."""

_RUN = 5
_BANDS, _ROWS = 32, 8  # of a signature: texts alike by 0.8 meet in some band (99.7 %), by 0.5 hardly ever
_MOST_COMPARED = 64  # of each band: a template that thousands of pages share is not compared with all of them
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]{1,8})*")

Exists = Callable[[str], bool | None]
"""Says of a link whether what it leads to is there; None: nobody has looked."""


def check_page(page: Page, keywords: Sequence[str] = (), exists: Exists | None = None) -> list[Check]:
    """The checks of one page, always in the same order."""
    return [
        _check("HTML", _listed(page.problems), "as it should be", "Mend the file: a search engine guesses otherwise."),
        _length("title", page.title, LONGEST_TITLE),
        _length("description", page.description, LONGEST_DESCRIPTION),
        _one_h1(page),
        _heading_order(page),
        _links(page),
        *([_broken_links(page, exists)] if exists else []),
        _image_texts(page),
        length_check(page.text),
        readability_check(page.text, page.lang),
        _language(page),
        _canonical(page),
        *(keyword_check(page, keyword) for keyword in keywords if words_of(keyword)),
    ]


def _check(name: str, wrong: str, right: str, advice: str) -> Check:
    return Check(name, not wrong, wrong or right, advice if wrong else "")


def _listed(things: Iterable[str], most: int = 5) -> str:
    """The first few; a page with ten thousand bad links is still one line."""
    every = [thing if len(thing) <= 100 else f"{thing[:99]}…" for thing in things]
    more = f" and {len(every) - most:,} more" if len(every) > most else ""
    return "; ".join(every[:most]) + more


def _length(name: str, text: str | None, longest: int) -> Check:
    if text is None:
        return Check(name, False, "missing", f"Give the page a {name} of its own, {longest} characters at most.")
    size = len(" ".join(text.split()))
    if not size:
        return Check(name, False, "empty", f"Say in at most {longest} characters what the page is about.")
    advice = f"Shorten it to {longest} characters: the rest is cut in search results."
    return Check(name, size <= longest, f"{size:,} characters", advice if size > longest else "")


def _one_h1(page: Page) -> Check:
    tops = [text for level, text in page.headings if level == 1]
    if not tops:
        return Check("one h1", False, "no h1", "Give the page one h1: its headline.")
    wrong = f"{len(tops)} h1: {_listed(tops, 3)}" if len(tops) > 1 else ""
    return _check("one h1", wrong, _listed(tops), "Keep one as h1, make the others h2.")


def _heading_order(page: Page) -> Check:
    wrong = [f"an h{level} without text" for level, text in page.headings if not text.strip()]
    for (above, _), (level, text) in pairwise(page.headings):
        if level > above + 1:
            wrong.append(f"h{above} is followed by h{level} “{' '.join(text.split())[:60]}”")
    right = f"{format_count(len(page.headings), 'heading')}, no level left out"
    return _check("heading order", _listed(wrong, 3), right, "Go down one level at a time, and leave no heading empty.")


def _links(page: Page) -> Check:
    empty = sum(not link.strip() for link in page.links)
    scripts = sum(link.strip().lower().startswith("javascript:") for link in page.links)
    wrong = [f"{empty:,} lead nowhere"] if empty else []
    wrong += [f"{scripts:,} run a script (javascript:)"] if scripts else []
    advice = "Give each link an address; what runs a script is a button."
    return _check("links", f"{_listed(wrong)} of {len(page.links):,}" if wrong else "", f"{len(page.links):,}", advice)


def _broken_links(page: Page, exists: Exists) -> Check:
    answers = {link: exists(link) for link in dict.fromkeys(page.links) if link.strip()}
    broken = [link for link, there in answers.items() if there is False]
    right = f"{sum(there is True for there in answers.values()):,} links within the site lead somewhere"
    advice = "Mend or take out the links: what they lead to is not there."
    return _check("broken links", f"not there: {_listed(broken)}" if broken else "", right, advice)


def _image_texts(page: Page) -> Check:
    without = [source for source, text in page.images if text is None]
    wrong = f"{len(without):,} of {len(page.images):,} without alt: {_listed(without, 3)}" if without else ""
    advice = 'Say in alt what the image shows; alt="" where it is decoration.'
    return _check("image texts", wrong, f"{len(page.images):,} images", advice)


def _language(page: Page) -> Check:
    said = (page.lang or "").strip()
    wrong = "" if _LANGUAGE.fullmatch(said) else repr(said[:40]) if said else "missing"
    return _check("language", wrong, said, 'Say the language: <html lang="en">.')


def _canonical(page: Page) -> Check:
    said = (page.canonical or "").strip()
    whole = re.match(r"https?://[^/\s]", said, re.IGNORECASE)
    wrong = "" if whole else f"not a whole address: {said[:100]}" if said else "missing"
    advice = 'Name the page\'s own address: <link rel="canonical" href="https://…">.'
    return _check("canonical", wrong, said[:200], advice)


def keyword_check(page: Page, keyword: str) -> Check:
    """Where the words of a keyword stand on a page."""
    tops = " ".join(text for level, text in page.headings if level == 1)
    places = {
        "title": page.title or "",
        "description": page.description or "",
        "h1": tops,
        f"first {FIRST_WORDS} words": first_words(page.text),
    }
    where = {place for place, text in places.items() if stands_in(keyword, text)}
    times, share = share_of(keyword, page.text)
    said = [f"in {', '.join(place for place in places if place in where)}"] if where else []
    said += [f"not in {', '.join(place for place in places if place not in where)}"] if len(where) < len(places) else []
    if repeated(times, share):
        advice = "Say it less often: it reads as repetition."
    elif "title" not in where or not where & {"h1", f"first {FIRST_WORDS} words"}:
        advice = "If the page is about this, say so in its title and in its h1 or first words."
    else:
        advice = ""
    return Check(f"keyword: {keyword.strip()}", not advice, "; ".join([*said, share_text(times, share)]), advice)


@dataclass
class Repeats:
    """Pages of a site that have the same title, description or text, or nearly the same text."""

    _titles: dict[bytes, list[int]] = field(default_factory=lambda: defaultdict(list))
    _descriptions: dict[bytes, list[int]] = field(default_factory=lambda: defaultdict(list))
    _texts: dict[bytes, list[int]] = field(default_factory=lambda: defaultdict(list))
    _own: list[str] = field(default_factory=list)
    _signatures: dict[int, NDArray[np.uint32]] = field(default_factory=dict)

    def add(self, page: Page) -> None:
        """Remembers what is needed of the next page; pages are numbered from 0 in this order."""
        number = len(self._own)
        self._own.append((page.canonical or "").strip())
        words = words_of(page.text)
        for known, text in ((self._titles, page.title), (self._descriptions, page.description)):
            if text and text.strip():
                known[_digest(" ".join(text.casefold().split()))].append(number)
        if words:
            same = self._texts[_digest(" ".join(words))]
            if not same and len(words) >= _RUN:
                self._signatures[number] = _signature(words)
            same.append(number)

    def same_titles(self) -> list[list[int]]:
        """Groups of pages with the same title."""
        return self._undeclared(self._titles.values())

    def same_descriptions(self) -> list[list[int]]:
        """Groups of pages with the same description."""
        return self._undeclared(self._descriptions.values())

    def same_texts(self) -> list[list[int]]:
        """Groups of pages whose words are the same."""
        return self._undeclared(self._texts.values())

    def alike(self) -> list[tuple[list[int], float]]:
        """Groups of pages whose texts are nearly the same, and what the least alike of them shares with the first."""
        groups: dict[int, list[int]] = {}  # of a page, those that came after it and are like it
        bands: dict[tuple[int, bytes], list[int]] = defaultdict(list)
        for number, signature in self._signatures.items():
            keys = [(band, part.tobytes()) for band, part in enumerate(signature.reshape(_BANDS, _ROWS))]
            met = sorted({other for key in keys for other in bands[key]})
            shares = self._shares(signature, met)
            best = int(shares.argmax()) if met else 0
            if met and shares[best] >= ALIKE:
                groups[met[best]].append(number)
                continue
            groups[number] = [number]
            for key in keys:
                if len(bands[key]) < _MOST_COMPARED:
                    bands[key].append(number)
        return [
            (group, float(self._shares(self._signatures[group[0]], group[1:]).min()))
            for group in self._undeclared(groups.values())
        ]

    def _shares(self, signature: NDArray[np.uint32], others: Sequence[int]) -> NDArray[np.float64]:
        """What a text has in common with others, about: two hundredths up or down."""
        every = [self._signatures[other] for other in others]
        return (np.stack(every) == signature).mean(axis=1) if every else np.empty(0)

    def _undeclared(self, groups: Iterable[list[int]]) -> list[list[int]]:
        """Without pages that name the same canonical address: who says that they are one page has done all there is."""
        found = []
        for group in groups:
            first_of = {self._own[number] or number: number for number in reversed(group)}
            if len(first_of) > 1:
                found.append(sorted(first_of.values()))
        return sorted(found)


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()


def _signature(words: Sequence[str]) -> NDArray[np.uint32]:
    """MinHash: equal places of two signatures are about the share of runs of words that two texts have in common."""
    numbers = {word: int.from_bytes(_digest(word)[:8], "little") for word in set(words)}
    hashes = np.fromiter((numbers[word] for word in words), np.uint64, len(words))
    runs = np.zeros(len(words) - _RUN + 1, np.uint64)
    for place in range(_RUN):  # all arithmetic is modulo 2⁶⁴
        runs = runs * np.uint64(0x9E3779B97F4A7C15) + hashes[place : place + len(runs)]
    runs = np.unique(runs ^ (runs >> np.uint64(29)))
    lowest = np.full(_BANDS * _ROWS, 2**32 - 1, np.uint32)
    for first in range(0, len(runs), 4096):  # a book of a page in bounded memory
        mixed = runs[first : first + 4096, None] * _MULTIPLIERS + _OFFSETS
        lowest = np.minimum(lowest, (mixed >> np.uint64(32)).astype(np.uint32).min(axis=0))
    return lowest


_MULTIPLIERS, _OFFSETS = np.random.Generator(np.random.PCG64(0)).integers(
    0, 2**64, (2, _BANDS * _ROWS), np.uint64, endpoint=False
)
_MULTIPLIERS |= np.uint64(1)
