"""Extracts the main text of each page: its sentences, except those that a template repeats on many pages.

A template may contain a slot ("order the {product} until Friday"), so its sentences differ from page to page. Outside
the slot, runs of three words are the same on all pages. A sentence therefore counts as part of a template if at least
half of its words are in runs that many pages contain.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.seo.site.text_rules import words_of

if TYPE_CHECKING:
    from unisono.recipes.seo.data.pages import Page

_RUN = 3  # words
_SHARE, _MIN_PAGES = 0.15, 4
"""A run of words belongs to a template if it occurs in at least this fraction and at least this number of pages."""
_COVERED = 0.5  # a sentence belongs to a template if this fraction of its words is in such runs
_MAX_CHARACTERS = 60_000  # maximum number of characters of a page that are compared
_MAX_WORDS = 220  # maximum number of words to embed: small encoders are trained on texts of about this length
_END = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|(?<=[。！？])|\n+")
_BAR = re.compile(r"\s+[|–—·»]\s+|\s+-\s+|\s*:\s+")
_PRIMES = np.array([1_000_003, 19_349_663, 83_492_791, 2_654_435_761], np.uint64)


@dataclass
class Content:
    """The parts of a page that are compared."""

    title: str
    """The title without the site's name."""
    headline: str
    sentences: list[str] = field(default_factory=list)
    """The sentences of the main text."""
    num_dropped: int = 0
    """Number of sentences that were dropped because a template repeats them."""

    @property
    def text(self) -> str:
        """The text to be embedded: the title and the beginning of the main text."""
        return f"{self.title}. {self.beginning}".strip()

    @property
    def beginning(self) -> str:
        """The beginning of the main text."""
        return " ".join(" ".join(self.sentences).split()[:_MAX_WORDS])


class Contents:
    """Collects the texts of pages one by one."""

    def __init__(self) -> None:
        self._titles: list[str] = []
        self._headlines: list[str] = []
        self._sentences: list[list[str]] = []

    def add(self, page: Page, link_texts: Iterable[str] = ()) -> None:
        """Adds the next page; ignores sentences that consist only of a link's text, as in menus and lists."""
        links = {_fold(text) for text in link_texts}
        self._titles.append(page.title or "")
        self._headlines.append(next((text for level, text in page.headings if level == 1), ""))
        parts = (part.strip() for part in _END.split(page.text[:_MAX_CHARACTERS]))
        self._sentences.append([part for part in parts if part and _fold(part) not in links])

    def finish(self) -> list[Content]:
        """Returns the content of each page without template sentences."""
        keep = _own_sentences(self._sentences)
        names = _site_names(self._titles)
        contents = []
        for title, headline, sentences, kept in zip(self._titles, self._headlines, self._sentences, keep, strict=True):
            own = [sentence for sentence, is_own in zip(sentences, kept, strict=True) if is_own]
            heading = _fold(headline)
            own = [sentence for sentence in own if _fold(sentence) != heading]
            contents.append(Content(without_names(title, names), headline, own, len(sentences) - len(own)))
        return contents


def without_names(title: str, names: Sequence[str]) -> str:
    """Removes the name of the site from a title."""
    parts = [part for part in _BAR.split(title) if part.strip() and _fold(part) not in names]
    return ": ".join(parts) if parts else title


def _site_names(titles: Sequence[str]) -> list[str]:
    """Returns the parts of titles that many pages share, such as the site's name after a vertical bar."""
    counts = Counter(part for title in titles for part in {_fold(part) for part in _BAR.split(title)} if part)
    return [part for part, count in counts.items() if count >= max(_MIN_PAGES, _SHARE * len(titles))]


def _fold(text: str) -> str:
    return " ".join(text.casefold().split())


def _own_sentences(pages: Sequence[Sequence[str]]) -> list[list[bool]]:
    """Returns for each sentence of each page whether it belongs to the page, not to a template."""
    numbers: dict[str, int] = {}
    rows, sizes = list[int](), list[int]()
    for sentences in pages:
        for sentence in sentences:
            words = words_of(sentence)
            sizes.append(len(words))
            rows += [numbers.setdefault(word, len(numbers)) for word in words]
    words_, sizes_ = np.array(rows, np.int64), np.array(sizes, np.int64)
    page_of = np.repeat(np.arange(len(pages)), [len(sentences) for sentences in pages])
    common = _common_words(words_, sizes_, page_of, max(_MIN_PAGES, _SHARE * len(pages)))
    starts = np.concatenate([[0], np.cumsum(sizes_)])
    totals = np.concatenate([[0], np.cumsum(common)])
    covered = (totals[starts[1:]] - totals[starts[:-1]]) / np.maximum(sizes_, 1)
    own = (covered < _COVERED) & (sizes_ > 0)
    ends = np.cumsum([len(sentences) for sentences in pages])[:-1]
    return [part.tolist() for part in np.split(own, ends)] if len(pages) else []


def _common_words(
    words: NDArray[np.int64], sizes: NDArray[np.int64], page_of: NDArray[np.int64], most: float
) -> NDArray[np.bool_]:
    """Returns for each word whether it is in a run that many pages contain; a shorter sentence counts as one run."""
    sentence_of = np.repeat(np.arange(len(sizes)), sizes)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    common = np.zeros(len(words), bool)
    for length in range(1, _RUN + 1):
        first = np.arange(len(words) - length + 1)
        inside = sentence_of[first] == sentence_of[first + length - 1]
        if length < _RUN:  # only sentences of exactly this length
            inside &= (sizes[sentence_of[first]] == length) & (starts[sentence_of[first]] == first)
        first = first[inside]
        if not len(first):
            continue
        keys = np.full(len(first), length, np.uint64)
        for offset in range(length):
            keys = (keys ^ words[first + offset].astype(np.uint64)) * _PRIMES[offset]
            keys ^= keys >> np.uint64(29)
        runs, which = np.unique(keys, return_inverse=True)
        pairs = np.unique(which.astype(np.int64) * (int(page_of.max(initial=0)) + 1) + page_of[sentence_of[first]])
        num_pages = np.bincount(pairs // (int(page_of.max(initial=0)) + 1), minlength=len(runs))
        frequent = first[num_pages[which] >= most]
        for offset in range(length):
            common[frequent + offset] = True
    return common
