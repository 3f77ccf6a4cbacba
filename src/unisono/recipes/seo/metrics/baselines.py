"""What plain words find: TF-IDF, BM25 and chance, the lines that a trained model is measured beside.

Pages are read twice, in blocks: once to count in how many of them each word stands, once to score. So memory holds one
block and the vocabulary, however many pages there are.
"""

from __future__ import annotations

import math
import operator
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.engine.recipe import Work
from unisono.recipes.seo.metrics.ranking import CUT, RECALLS, TopPages

# Scripts without spaces would be one word to a sentence: their characters stand for themselves, as Lucene has it.
_ALONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_ALONE}]|[^\W{_ALONE}]+")
_BLOCK = 20_000  # pages
_SCORES = 4_000_000  # of queries × pages at once

Pages = Callable[[], Iterable[str]] | Sequence[str]
"""Texts that can be read again."""


def words_of(text: str) -> list[str]:
    """The words of a text, in small letters; digits count as letters."""
    return _WORD.findall((text if text.isascii() else unicodedata.normalize("NFKC", text)).lower())


@dataclass
class Statistics:
    """What scoring must know of all pages."""

    num_pages: int = 0
    num_words: int = 0
    pages_with: Counter[str] = field(default_factory=Counter)
    """In how many pages each word stands."""

    def add(self, block: Postings) -> None:
        """Counts a block of pages."""
        self.num_pages += len(block.lengths)
        self.num_words += int(block.lengths.sum())
        self.pages_with.update(dict(zip(block.numbers, np.diff(block.starts).tolist(), strict=True)))

    def merge(self, other: Statistics) -> None:
        """Adds what was counted elsewhere."""
        self.num_pages += other.num_pages
        self.num_words += other.num_words
        self.pages_with.update(other.pages_with)


class Postings:
    """A block of pages by word: which pages have it, and how often."""

    def __init__(self, pages: Iterable[str]) -> None:
        numbers: defaultdict[str, int] = defaultdict()
        numbers.default_factory = numbers.__len__  # a new word gets the next number
        said = [np.array([numbers[word] for word in words_of(text)], np.int64) for text in pages]
        self.numbers = dict(numbers)
        """The number of each word, in the order in which they came."""
        self.lengths = np.array([len(one) for one in said], np.int64)
        rows = np.repeat(np.arange(len(said)), self.lengths)
        pairs, counts = np.unique(
            np.concatenate([*said, np.zeros(0, np.int64)]) * max(1, len(said)) + rows, return_counts=True
        )
        words, self.pages = np.divmod(pairs, max(1, len(said)))
        self.words, self.counts = words, counts.astype(np.float64)
        self.starts = np.searchsorted(words, np.arange(len(numbers) + 1))


class _Lexical:
    """Pages whose score is a sum over the words that a query shares with them."""

    def __init__(self, pages: Iterable[str] | Postings, known: Statistics | None = None) -> None:
        self._block = pages if isinstance(pages, Postings) else Postings(pages)
        if known is None:
            known = Statistics()
            known.add(self._block)
        self._known = known
        with_word = np.array([known.pages_with[word] for word in self._block.numbers], np.float64)
        self._idf = self._rarity(with_word, known.num_pages)
        self._weights = self._weigh().astype(np.float32)

    def scores(self, query: str) -> NDArray[np.float32]:
        """[P] how well each page fits a query; 0 without a common word."""
        block = self._block
        found = np.zeros(len(block.lengths), np.float32)
        for word, weight in self._query(Counter(words_of(query))).items():
            number = block.numbers.get(word)
            if number is not None:
                part = slice(block.starts[number], block.starts[number + 1])
                found[block.pages[part]] += np.float32(weight) * self._weights[part]
        return found

    def _rarity(self, with_word: NDArray[np.float64], num_pages: int) -> NDArray[np.float64]:
        raise NotImplementedError

    def _weigh(self) -> NDArray[np.float64]:
        """What each posting is worth."""
        raise NotImplementedError

    def _query(self, counts: Mapping[str, int]) -> Mapping[str, float]:
        """What each word of a query is worth."""
        return counts


class TfIdf(_Lexical):
    """The cosine of word counts weighted by rarity (smooth idf, l2), as scikit-learn's TfidfVectorizer has it.

    `sublinear`: a count n weighs 1 + ln n, so that a word said ten times is not ten times as important.
    """

    def __init__(
        self, pages: Iterable[str] | Postings, sublinear: bool = False, known: Statistics | None = None
    ) -> None:
        self._sublinear = sublinear
        super().__init__(pages, known)

    def _damped(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        damped: NDArray[np.float64] = 1 + np.log(counts) if self._sublinear else counts
        return damped

    def _rarity(self, with_word: NDArray[np.float64], num_pages: int) -> NDArray[np.float64]:
        rarity: NDArray[np.float64] = np.log((1 + num_pages) / (1 + with_word)) + 1
        return rarity

    def _weigh(self) -> NDArray[np.float64]:
        block = self._block
        weights = self._damped(block.counts) * self._idf[block.words]
        squares = np.bincount(block.pages, weights**2, minlength=len(block.lengths))
        lengths: NDArray[np.float64] = np.sqrt(squares)[block.pages]
        return weights / lengths

    def _query(self, counts: Mapping[str, int]) -> Mapping[str, float]:
        known = {word: self._known.pages_with[word] for word in counts if word in self._known.pages_with}
        if not known:
            return {}
        rarity = self._rarity(np.array(list(known.values()), np.float64), self._known.num_pages)
        weights = rarity * self._damped(np.array([counts[word] for word in known], np.float64))
        weights /= np.sqrt((weights**2).sum())
        return dict(zip(known, weights.tolist(), strict=True))


class BM25(_Lexical):
    """BM25 in Lucene's form: idf never below 0, no factor k1 + 1; lengths are exact where Lucene rounds them."""

    def __init__(
        self,
        pages: Iterable[str] | Postings,
        k1: float = 0.9,
        b: float = 0.4,
        known: Statistics | None = None,
    ) -> None:
        self._k1, self._b = k1, b
        super().__init__(pages, known)

    def _rarity(self, with_word: NDArray[np.float64], num_pages: int) -> NDArray[np.float64]:
        rarity: NDArray[np.float64] = np.log1p((num_pages - with_word + 0.5) / (with_word + 0.5))
        return rarity

    def _weigh(self) -> NDArray[np.float64]:
        block = self._block
        mean = self._known.num_words / max(1, self._known.num_pages)
        long = self._k1 * (1 - self._b + self._b * block.lengths / max(mean, 1e-9))
        return self._idf[block.words] * block.counts / (block.counts + long[block.pages])


def baselines(
    queries: Sequence[str],
    pages: Pages,
    judged: Mapping[int, Mapping[int, float]],
    work: Work | None = None,
    best: dict[str, torch.Tensor] | None = None,
) -> dict[str, dict[str, float]]:
    """The figures of TF-IDF, of BM25, and those that random order gives on average.

    `judged`: query number -> page number -> grade. With `work` the blocks of pages are shared over the ranks, which
    must all ask; empty when somebody asked to stop. A page that shares no word with a query is not found by words.
    """
    known, first_block = Statistics(), list[Postings]()  # few pages are not read twice
    for _, block in _shared(pages, work):
        postings = Postings(block)
        known.add(postings)
        first_block = first_block or [postings]
    parts = [(known, False)] if work is None else work.gather((known, work.stopping))
    if any(stopped for _, stopped in parts):
        return {}
    known = Statistics()
    for part, _ in parts:
        known.merge(part)
    tops = {name: TopPages(judged, len(queries)) for name in ("tfidf", "bm25")}
    for start, block in _shared(pages, work):
        postings = first_block.pop() if first_block else Postings(block)
        # Damped, because it finds more: .85 against .81 MRR@10 of Debian's packages. A weak line flatters a model.
        scorers = {"tfidf": TfIdf(postings, sublinear=True, known=known), "bm25": BM25(postings, known=known)}
        numbers = torch.arange(start, start + len(block))
        for first in range(0, len(queries), max(1, _SCORES // len(block))):
            some = queries[first : first + max(1, _SCORES // len(block))]
            rows = torch.arange(first, first + len(some))
            for name, scorer in scorers.items():
                scores = torch.from_numpy(np.stack([scorer.scores(query) for query in some]))
                tops[name].update(torch.where(scores > 0, scores, math.nan), numbers, rows)
    everybody = [(tops, False)] if work is None else work.gather((tops, work.stopping))
    if any(stopped for _, stopped in everybody):
        return {}
    (tops, _), *others = everybody
    for theirs, _ in others:
        for name, top in tops.items():
            top.merge_state(theirs[name])
    if best is not None:  # the numbers of the pages themselves
        best.update({name: top.pages() for name, top in tops.items()})
    return {"random": by_chance(judged, known.num_pages), **{name: top.compute() for name, top in tops.items()}}


def by_chance(judged: Mapping[int, Mapping[int, float]], num_pages: int) -> dict[str, float]:
    """What a random order of all pages gives on average."""
    relevant = [grades for each in judged.values() if (grades := [grade for grade in each.values() if grade > 0])]
    if not relevant or not num_pages:
        return {}
    discounts = [1 / math.log2(place + 2) for place in range(CUT)]
    firsts, gains = [], []
    for grades in relevant:
        count, seen = len(grades), sum(discounts[:num_pages])
        ideal = sum(map(operator.mul, sorted(grades, reverse=True), discounts))
        gains.append(sum(grades) / num_pages * seen / ideal)
        none_yet, expected = 1.0, 0.0
        for place in range(min(CUT, num_pages)):
            here = min(1.0, count / (num_pages - place))
            expected += none_yet * here / (place + 1)
            none_yet *= 1 - here
        firsts.append(expected)
    recalls = {f"Recall@{cut}": min(1.0, cut / num_pages) for cut in RECALLS}
    mean = {f"MRR@{CUT}": firsts, f"NDCG@{CUT}": gains}
    return {**{name: math.fsum(values) / len(values) for name, values in mean.items()}, **recalls}


def _shared(pages: Pages, work: Work | None) -> Iterator[tuple[int, list[str]]]:
    """This process's blocks of pages, with the number of their first; no more of them once somebody asked to stop."""
    mine = range(10**9) if work is None else work.share(range(10**9))
    texts = iter(pages() if callable(pages) else pages)
    number = 0
    while block := list(islice(texts, _BLOCK)):
        if work is not None and work.stopping:
            return
        if number in mine:
            yield number * _BLOCK, block
        number += 1
