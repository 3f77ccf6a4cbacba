"""Compares all pages of a site with each other, by an encoder or, if there is none, by BM25."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar
from urllib.parse import quote, urljoin, urlsplit

import numpy as np

from unisono.recipes.seo.metrics.baselines import BM25
from unisono.recipes.seo.site.semantic.contents import Content, Contents
from unisono.recipes.seo.site.semantic.duplicates import Duplicate, near_duplicates
from unisono.recipes.seo.site.semantic.links import suggest_links
from unisono.recipes.seo.site.semantic.moves import moves
from unisono.recipes.seo.site.semantic.results import Meaning, Unreachable
from unisono.recipes.seo.site.semantic.rivals import Seen, contests
from unisono.recipes.seo.site.semantic.space import Dense, Encoder, Lexical, Vectors
from unisono.recipes.seo.site.semantic.strays import strays
from unisono.recipes.seo.site.semantic.topics import links_of, topics
from unisono.recipes.seo.site.technical.indexing import is_indexable
from unisono.recipes.seo.site.technical.site_facts import NO_HOST, SiteFacts

NO_ENCODER = (
    "Pages were compared by their words (BM25), because no encoder was passed. To compare them by meaning, pass "
    "--encoder minilm (part of unisono[seo], nothing is downloaded), a model's folder, or a run of the task rank."
)
_RELATED = 3
_Found = TypeVar("_Found")
_MAX_RANKED = 50


def compare_pages(
    facts: SiteFacts,
    contents: Contents,
    encoder: Encoder | None = None,
    queries: Sequence[str] = (),
    old: tuple[Sequence[str], Contents] | None = None,
    seen: Mapping[str, Mapping[int, Seen]] | None = None,
) -> Meaning:
    """Compares the pages of a site. `old`: names and contents of an earlier version's pages; `seen`: clicks."""
    pages = contents.finish()
    names = [page.name for page in facts.pages]
    meaning = Meaning("BM25" if encoder is None else encoder.name, names)
    meaning.texts = [f"{page.title}\n\n{' '.join(page.sentences)}".strip() for page in pages]
    meaning.remarks = [NO_ENCODER] if encoder is None else [f"Pages were compared by {encoder.name}, with BM25 beside."]
    among = [
        number
        for number, page in enumerate(facts.pages)
        if is_indexable(facts, page) and (pages[number].sentences or pages[number].title)
    ]
    lexical = Lexical([page.text for page in pages])
    words = lexical.embed([page.text for page in pages])
    space = lexical if encoder is None else Dense(encoder)
    texts = words if encoder is None else space.embed([page.text for page in pages])
    if isinstance(space, Dense):
        space.adapt(texts.take(among))
    linked = _linked(facts)
    texted = [number for number in among if pages[number].sentences]

    duplicates = near_duplicates(pages, texts, texted, space)
    meaning.duplicates = _beside(duplicates, words, [(each.page, each.other) for each in duplicates])
    meaning.kept = _kept(duplicates, linked, names)
    found = strays(pages, names, texts, texted)
    near = words.take(texted).nearest(words.take(texted), 6, is_same=True)[1] if found else np.zeros((0, 1))
    place = {page: row for row, page in enumerate(texted)}
    meaning.strays = [(each, float(near[place[each.page], 3:].mean())) for each in found]
    titles = space.embed([page.title or page.headline for page in pages])
    if queries:
        ranks = _bm25_ranks(queries, pages)
        meaning.contests = contests(queries, pages, texts, titles, among, space, ranks, seen, meaning.kept)
    anchored = {number: [link.text for link in page.links] for number, page in enumerate(facts.pages)}
    links = suggest_links(pages, texts, among, linked, anchored, space.limits.related, meaning.kept)
    meaning.links = _beside(links, words, [(each.source, each.target) for each in links])
    meaning.unreachable = _unreachable(facts, linked, among, texts, words)
    off_topic = {each.page for each in found}
    grouped = topics(pages, texts, [page for page in texted if page not in off_topic])
    meaning.topics = [(topic, links_of(topic, linked)) for topic in grouped]
    if old is not None:
        _add_moves(meaning, facts, old, pages, among, texts, titles, space, lexical, words)
    return meaning


def _beside(found: Sequence[_Found], words: Vectors, pairs: Sequence[tuple[int, int]]) -> list[tuple[_Found, float]]:
    """Pairs each finding with the BM25 cosine of its two pages."""
    cosines = words.pairs([one for one, _ in pairs], [other for _, other in pairs])
    return list(zip(found, cosines.tolist(), strict=True))


def _linked(facts: SiteFacts) -> dict[int, set[int]]:
    """Returns the pages that each page links to."""
    linked: dict[int, set[int]] = {}
    for number, page in enumerate(facts.pages):
        targets = {facts.resolve(link.target).page for link in page.links if not link.nofollow}
        linked[number] = {target for target in targets if target is not None and target != number}
    return linked


def _kept(duplicates: Sequence[Duplicate], linked: Mapping[int, set[int]], names: Sequence[str]) -> dict[int, int]:
    """Maps each duplicate to the page to keep, which has the most incoming links or, if equal, the shortest name."""
    counts = np.bincount([target for targets in linked.values() for target in targets], minlength=len(names))

    def worth(page: int) -> tuple[int, int, str]:
        return -int(counts[page]), len(names[page]), names[page]

    kept: dict[int, int] = {}

    def root(page: int) -> int:
        while page in kept:
            page = kept[page]
        return page

    for each in duplicates:
        one, other = sorted((root(each.page), root(each.other)), key=worth)
        if one != other:
            kept[other] = one
    return {page: root(page) for page in kept}


def _bm25_ranks(queries: Sequence[str], pages: Sequence[Content]) -> dict[str, dict[int, int]]:
    bm25 = BM25([page.text for page in pages])
    ranks: dict[str, dict[int, int]] = {}
    for query in queries:
        scores = bm25.scores(query)
        order = np.argsort(-scores, kind="stable")[:_MAX_RANKED].tolist()
        ranks[query] = {page: rank for rank, page in enumerate(order, 1) if scores[page] > 0}
    return ranks


def _unreachable(
    facts: SiteFacts, linked: Mapping[int, set[int]], among: Sequence[int], texts: Vectors, words: Vectors
) -> list[Unreachable]:
    """Returns pages that links from the start page do not reach; without a start page, pages that nothing links to."""
    if not facts.is_complete:
        return []
    if facts.start is None:
        reached = {target for targets in linked.values() for target in targets}
    else:
        reached, waiting = {facts.start}, [facts.start]
        while waiting:
            new = linked[waiting.pop()] - reached
            reached |= new
            waiting += new
    missing = [page for page in among if page not in reached]
    sources = [page for page in among if page in reached]
    numbers, cosines = texts.take(missing).nearest(texts.take(sources), _RELATED)
    return [
        Unreachable(
            page,
            [
                (sources[column], cosine, float(words.pairs([page], [sources[column]])[0]))
                for column, cosine in zip(numbers[row].tolist(), cosines[row].tolist(), strict=True)
            ],
        )
        for row, page in enumerate(missing)
    ]


def _add_moves(
    meaning: Meaning,
    facts: SiteFacts,
    old: tuple[Sequence[str], Contents],
    pages: Sequence[Content],
    among: Sequence[int],
    texts: Vectors,
    titles: Vectors,
    space: Lexical | Dense,
    lexical: Lexical,
    words: Vectors,
) -> None:
    old_names, before = list(old[0]), old[1].finish()
    missing = [
        number
        for number, name in enumerate(old_names)
        if facts.resolve(urljoin(facts.base, quote(_path_of(name).lstrip("/"), errors="replace"))).kind
        not in ("page", "file")
    ]
    meaning.num_same_address = len(old_names) - len(missing)
    left, names = [before[number] for number in missing], [_path_of(old_names[number]) for number in missing]
    beside = lexical.embed([page.text for page in left]), words.take(among)
    meaning.moves = moves(names, left, pages, among, texts, titles, space, beside)
    meaning.new_urls = {
        number: page.url.replace(NO_HOST, "/") if page.url.startswith(NO_HOST) else urlsplit(page.url).path
        for number, page in enumerate(facts.pages)
    }
    meaning.remarks.append(
        f"{len(old_names):,} pages of the old version: {meaning.num_same_address:,} still have their address."
    )


def _path_of(name: str) -> str:
    return urlsplit(name).path if "://" in name else name
