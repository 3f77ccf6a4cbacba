"""Derives weak labels from clicks: how well a page answers a query, corrected for the position at which it was shown.

People see the first results and rarely the tenth, so few clicks at position 9 may show more interest than many at
position 1. A position-based model separates position from interest: the probability of a click is the probability that
a user examines a result at this position, times the page's attraction. The probability of examination is a power of
the position, whose exponent is fitted to the export. The attraction is the number of clicks per examined impression;
for pages with few examined impressions, it is shrunk towards the mean of the export.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unisono.recipes.seo.data.search_console import SearchConsole, Shown
from unisono.recipes.seo.site.semantic.rivals import Seen
from unisono.recipes.seo.site.technical.site_facts import SiteFacts

_USUAL_DECAY, _LEAST_DECAY, _MOST_DECAY = 1.0, 0.3, 2.0
_MIN_ROWS = 20  # number of rows needed to fit the decay
_PRIOR = 10.0  # weight of the export's mean attraction, in examined impressions
_MIN_IMPRESSIONS, _MIN_WEIGHT = 10.0, 0.05


@dataclass(frozen=True)
class Label:
    """A page that answers a query, judged by clicks."""

    query: str
    page: int
    weight: float
    """From 0 to 1: the page's attraction, as a fraction of the best page's for the query, times the certainty."""
    seen: Seen


def decay_of(rows: Sequence[Shown]) -> float:
    """Returns the exponent d of the click rate, which is proportional to position ** -d, fitted to the rows."""
    usable = [row for row in rows if row.clicks > 0 and row.impressions >= _MIN_IMPRESSIONS and row.position >= 1]
    if len(usable) < _MIN_ROWS:
        return _USUAL_DECAY
    # Bin positions first: a single row without clicks has no logarithm, and leaving it out would bias the fit.
    bins: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        if row.impressions > 0 and row.position >= 1:
            entry = bins[round(2 * math.log2(min(row.position, 100.0)))]
            entry[0] += row.clicks
            entry[1] += row.impressions
    points = [
        (place / 2 * math.log(2), math.log(clicks / shown), shown)
        for place, (clicks, shown) in bins.items()
        if clicks > 0
    ]
    if len(points) < 3:
        return _USUAL_DECAY
    x, y, weight = (np.array(column) for column in zip(*points, strict=True))
    weight = np.sqrt(weight)
    mean_x, mean_y = np.average(x, weights=weight), np.average(y, weights=weight)
    variance = float((weight * (x - mean_x) ** 2).sum())
    slope = float((weight * (x - mean_x) * (y - mean_y)).sum()) / variance if variance > 1e-9 else -_USUAL_DECAY
    return min(_MOST_DECAY, max(_LEAST_DECAY, -slope))


def weak_labels(seen: Mapping[str, Mapping[int, Seen]], decay: float) -> list[Label]:
    """Returns labels for the pages that were shown often enough, grouped by query, best first."""

    def examined(each: Seen) -> float:
        return each.impressions / float(max(1.0, each.position) ** decay)

    everything = [each for pages in seen.values() for each in pages.values()]
    total = sum(map(examined, everything))
    mean = min(1.0, sum(each.clicks for each in everything) / total) if total else 0.0
    labels = []
    for query, pages in seen.items():
        attraction = {
            page: (each.clicks + _PRIOR * mean) / (examined(each) + _PRIOR)
            for page, each in pages.items()
            if each.clicks
        }
        best = max(attraction.values(), default=0.0)
        for page, value in sorted(attraction.items(), key=lambda item: (-item[1], item[0])):
            each = pages[page]
            certainty = examined(each) / (examined(each) + _PRIOR)
            weight = value / best * certainty
            if each.impressions >= _MIN_IMPRESSIONS and weight >= _MIN_WEIGHT:
                labels.append(Label(query, page, weight, each))
    return labels


def seen_pages(export: SearchConsole, facts: SiteFacts) -> tuple[dict[str, dict[int, Seen]], dict[int, Seen], int]:
    """Returns clicks by query and page, clicks by page, and the number of the export's pages that the site lacks."""
    by_query: defaultdict[str, dict[int, list[Shown]]] = defaultdict(dict)
    by_page: defaultdict[int, list[Shown]] = defaultdict(list)
    missing = set[str]()
    for row in (*export.pairs, *export.pages):
        assert row.page is not None
        target = facts.resolve(row.page)
        page = target.page if target.kind == "page" else facts.page_of_path(row.page)
        if page is None:
            missing.add(row.page)
        elif row.query is not None:
            by_query[row.query].setdefault(page, []).append(row)
        else:
            by_page[page].append(row)
    if not by_page:
        for pages in by_query.values():
            for page, rows in pages.items():
                by_page[page] += rows
    queries = {query: {page: total_of(rows) for page, rows in pages.items()} for query, pages in by_query.items()}
    return queries, {page: total_of(rows) for page, rows in by_page.items()}, len(missing)


def total_of(rows: Iterable[Shown]) -> Seen:
    """Adds up rows; the position of the sum is the mean over impressions."""
    each = list(rows)
    shown = sum(row.impressions for row in each)
    position = sum(row.position * row.impressions for row in each) / shown if shown else 0.0
    return Seen(sum(row.clicks for row in each), shown, position)
