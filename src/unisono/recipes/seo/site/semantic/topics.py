"""Groups the pages of a site by topic, and names each topic by the words that set it apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.recipes.seo.site.semantic.contents import Content
from unisono.recipes.seo.site.semantic.links import _STOP
from unisono.recipes.seo.site.semantic.space import Vectors
from unisono.recipes.seo.site.text_rules import words_of

_NEAR = 12
_MIN_PAGES = 3
_LABEL_WORDS = 3


@dataclass(frozen=True)
class Topic:
    """Pages about the same topic."""

    label: str
    pages: list[int]
    hub: int
    """The page nearest to the mean of all pages."""
    cosine: float
    """Mean cosine of the pages with their mean."""


def topics(contents: Sequence[Content], pages: Vectors, among: Sequence[int], resolution: float = 1.0) -> list[Topic]:
    """Returns topics of at least three pages, largest first: communities in the nearest-neighbour graph (Louvain)."""
    import networkx

    if len(among) < _MIN_PAGES:
        return []
    some = pages.take(among)
    numbers, cosines = some.nearest(some, _NEAR, is_same=True)
    graph: Any = networkx.Graph()
    graph.add_nodes_from(range(len(among)))
    floor = float(np.median(cosines[:, -1])) if cosines.size else 0.0
    for row, (near, values) in enumerate(zip(numbers.tolist(), cosines.tolist(), strict=True)):
        for other, cosine in zip(near, values, strict=True):
            if cosine > max(0.05, 0.5 * floor):
                graph.add_edge(row, other, weight=max(float(cosine), 1e-6) ** 2)
    groups: Any = networkx.community.louvain_communities(graph, weight="weight", resolution=resolution, seed=0)
    found = [sorted(group) for group in groups if len(group) >= _MIN_PAGES]
    found.sort(key=lambda group: (-len(group), group[0]))
    labels = _labels(contents, [[among[row] for row in group] for group in found])
    result = []
    for group, label in zip(found, labels, strict=True):
        rows = some.rows[np.asarray(group)]
        mean = np.asarray(rows.mean(axis=0), np.float32).reshape(-1)
        mean /= max(float(np.linalg.norm(mean)), 1e-9)
        near = np.asarray(rows @ mean).reshape(-1)
        result.append(Topic(label, [among[row] for row in group], among[group[int(near.argmax())]], float(near.mean())))
    return result


def _labels(contents: Sequence[Content], groups: Sequence[Sequence[int]]) -> list[str]:
    """Labels each group with the words that many of its pages and few pages of other groups contain."""
    counts = [Counter[str]() for _ in groups]
    for group, count in zip(groups, counts, strict=True):
        for page in group:
            own, title = set(words_of(contents[page].beginning)), set(words_of(contents[page].title))
            count.update({word: 1 + 2 * (word in title) for word in own | title})
    total: Counter[str] = sum(counts, Counter())
    labels = []
    for group, count in zip(groups, counts, strict=True):
        scores = {
            word: number / len(group) * math.log(1 + len(groups) * number / total[word])
            for word, number in count.items()
            if word not in _STOP and len(word) > 2 and not word.isdigit() and number > 1
        }
        best = sorted(scores, key=lambda word: (-scores[word], word))[:_LABEL_WORDS]
        labels.append(", ".join(best) or "no common word")
    return labels


def links_of(topic: Topic, linked: Mapping[int, set[int]]) -> int:
    """Returns the number of pages of a topic that link to its hub."""
    return sum(topic.hub in linked.get(page, ()) for page in topic.pages if page != topic.hub)
