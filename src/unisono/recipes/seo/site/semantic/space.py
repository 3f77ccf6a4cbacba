"""Represents texts as vectors, by an encoder or by BM25 word weights, and finds the nearest texts block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.seo.metrics.baselines import Postings, Statistics, words_of
from unisono.recipes.seo.site.semantic.limits import OF_MEANING, OF_WORDS

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]
Kind = Literal["query", "page"]

_BLOCK = 512  # number of texts to compare with all others at once
_K1, _B = 0.9, 0.4
# If a site has more than _LARGE pages, ignore words on more than this fraction of them: they cost most and tell least.
_MAX_SHARE, _LARGE = 0.1, 1_000


class Encoder(Protocol):
    """Embeds texts, as `trained.Ranker` does."""

    @property
    def name(self) -> str:
        """The encoder's name in the report."""

    def embed(self, texts: Sequence[str], kind: Kind = "page") -> Floats:
        """Returns unit vectors [texts, width]."""


class Vectors:
    """Unit vectors of texts: a dense or a sparse matrix [texts, width]."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    def take(self, numbers: Sequence[int] | Numbers) -> Vectors:
        """Returns the vectors of some of the texts."""
        return Vectors(self.rows[np.asarray(numbers, np.int64)])

    def blocks(self, other: Vectors) -> Iterator[tuple[int, Floats]]:
        """Yields the number of each block's first text, and the cosines of its texts with all texts of `other`."""
        across = other.rows.T.tocsc() if hasattr(other.rows, "tocsc") else other.rows.T
        for start in range(0, len(self), _BLOCK):
            products = self.rows[start : start + _BLOCK] @ across
            yield start, np.asarray(products.toarray() if hasattr(products, "toarray") else products, np.float32)

    def nearest(self, other: Vectors, most: int, *, is_same: bool = False) -> tuple[Numbers, Floats]:
        """Returns numbers and cosines of the nearest texts of `other`, in order; `is_same` excludes the text itself."""
        most = max(0, min(most, len(other) - is_same))
        numbers, cosines = np.zeros((len(self), most), np.int64), np.zeros((len(self), most), np.float32)
        for start, block in self.blocks(other):
            rows = np.arange(len(block))
            if is_same:
                block[rows, start + rows] = -np.inf
            if not most:
                continue
            some = np.argpartition(-block, most - 1, axis=1)[:, :most] if most < block.shape[1] else None
            some = np.broadcast_to(np.arange(block.shape[1]), block.shape) if some is None else np.sort(some, axis=1)
            values = np.take_along_axis(block, some, axis=1)
            order = np.argsort(-values, axis=1, kind="stable")
            numbers[start : start + len(block)] = np.take_along_axis(some, order, axis=1)[:, :most]
            cosines[start : start + len(block)] = np.take_along_axis(values, order, axis=1)[:, :most]
        return numbers, cosines

    def pairs(
        self, one: Sequence[int] | Numbers, other: Sequence[int] | Numbers, across: Vectors | None = None
    ) -> Floats:
        """Returns the cosine of each pair of texts."""
        a, b = np.asarray(one, np.int64), np.asarray(other, np.int64)
        left, right = self.rows, (across or self).rows
        if not len(a):
            return np.zeros(0, np.float32)
        parts = []
        for start in range(0, len(a), 8192):
            x, y = left[a[start : start + 8192]], right[b[start : start + 8192]]
            product = x.multiply(y).sum(axis=1) if hasattr(x, "multiply") else (x * y).sum(axis=1)
            parts.append(np.asarray(product, np.float32).reshape(-1))
        return np.concatenate(parts)

    def matrix(self, other: Vectors) -> Floats:
        """Returns the cosines of all texts with all texts of `other`; only for small numbers of texts."""
        return (
            np.concatenate([block for _, block in self.blocks(other)])
            if len(self)
            else np.zeros((0, len(other)), np.float32)
        )


class Lexical:
    """Represents texts by unit vectors of BM25 word weights, so the similarity of two texts is a cosine from 0 to 1."""

    name, limits = "BM25", OF_WORDS

    def __init__(self, pages: Sequence[str]) -> None:
        postings = Postings(pages)
        statistics = Statistics()
        statistics.add(postings)
        self._mean = statistics.num_words / max(1, statistics.num_pages)
        number, most = statistics.num_pages, statistics.num_pages
        if number > _LARGE:
            most = int(_MAX_SHARE * number)
        kept = [word for word, count in statistics.pages_with.items() if count <= most]
        self._numbers = {word: place for place, word in enumerate(kept)}
        counts = np.array([statistics.pages_with[word] for word in kept], np.float64)
        self._idf = np.log1p((number - counts + 0.5) / (counts + 0.5))

    def embed(self, texts: Sequence[str], kind: Kind = "page") -> Vectors:
        """Returns unit vectors of texts; ignores words that no page contains."""
        from scipy.sparse import csr_matrix

        rows, columns, weights = list[int](), list[int](), list[float]()
        for row, text in enumerate(texts):
            words = words_of(text)
            long = _K1 * (1 - _B + _B * len(words) / max(self._mean, 1e-9)) if kind == "page" else _K1
            counts: dict[int, int] = {}
            for word in words:
                if (number := self._numbers.get(word)) is not None:
                    counts[number] = counts.get(number, 0) + 1
            rows += [row] * len(counts)
            columns += counts
            weights += [self._idf[number] * count / (count + long) for number, count in counts.items()]
        values, at = np.array(weights, np.float64), np.array(rows, np.int64)
        lengths = np.sqrt(np.bincount(at, values**2, minlength=len(texts)))
        values = (values / np.maximum(lengths[at], 1e-12)).astype(np.float32) if len(at) else values.astype(np.float32)
        shape = (len(texts), max(1, len(self._numbers)))
        return Vectors(csr_matrix((values, (at, np.array(columns, np.int64))), shape=shape))


class Dense:
    """Represents texts by an encoder's embeddings, with the interface of `Lexical`."""

    def __init__(self, encoder: Encoder) -> None:
        self.name, self.limits, self._encoder = encoder.name, OF_MEANING, encoder

    def embed(self, texts: Sequence[str], kind: Kind = "page") -> Vectors:
        """Returns unit vectors of texts."""
        if not len(texts):
            return Vectors(np.zeros((0, 1), np.float32))
        return Vectors(np.asarray(self._encoder.embed(list(texts), kind), np.float32))

    def adapt(self, pages: Vectors) -> None:
        """Raises the limits for an encoder that finds any two pages similar."""
        number = min(len(pages), 1_000)
        if number < 2:
            return
        some = pages.take(np.linspace(0, len(pages) - 1, number).astype(np.int64))
        cosines = some.matrix(some)[np.triu_indices(number, 1)]
        self.limits = self.limits.shifted(float(np.median(cosines)))


Meaning = Lexical | Dense
"""Turns texts into vectors."""
