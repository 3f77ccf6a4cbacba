"""Suggests links within a site: from a page that mentions words of another page's title but does not link to it yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unisono.recipes.seo.site.semantic.contents import Content
from unisono.recipes.seo.site.semantic.space import Vectors
from unisono.recipes.seo.site.text_rules import words_of

_MIN_WORDS, _MAX_WORDS = 2, 8
_MOST = 5  # maximum number of suggestions per source page
_MOST_OF_TITLE = 0.7  # an anchor must contain this fraction of a title's words, not counting stop words
_LITTLE_WORDS = """
    a an the and or of to in on at for with by from how what which who why is are do does your my our you i it its
    this that over as be can we der die das und oder ein eine zu im am mit von für wie was le la les de des du et un
    une el los las y en con para
"""
_STOP = frozenset(_LITTLE_WORDS.split())


@dataclass(frozen=True)
class Link:
    """A suggested link."""

    source: int
    target: int
    anchor: str
    sentence: str
    cosine: float
    """Similarity of the two pages."""


def suggest_links(
    contents: Sequence[Content],
    pages: Vectors,
    among: Sequence[int],
    linked: Mapping[int, set[int]],
    link_texts: Mapping[int, Iterable[str]],
    least: float,
    same: Mapping[int, int] | None = None,
) -> list[Link]:
    """Suggests links between the pages `among`, best first per source page; `least` is the minimum similarity."""
    anchors = _anchors(contents, among, same or {})
    found: dict[tuple[int, int], tuple[str, str]] = {}
    for source in among:
        texts = [" ".join(words_of(text)) for text in link_texts.get(source, ())]
        for sentence in contents[source].sentences:
            for phrase in _phrases(words_of(sentence)):
                target = anchors.get(phrase)
                if target is None or target == source or target in linked.get(source, ()):
                    continue
                if any(phrase_text in text for text in texts for phrase_text in (" ".join(phrase),)):
                    continue
                best = found.get((source, target))
                if best is None or len(best[0].split()) < len(phrase):
                    found[source, target] = (" ".join(phrase), sentence)
    pairs = list(found)
    cosines = pages.pairs([one for one, _ in pairs], [other for _, other in pairs])
    links = [
        Link(source, target, *_as_written(*found[source, target]), float(cosine))
        for (source, target), cosine in zip(pairs, cosines.tolist(), strict=True)
        if cosine >= least
    ]
    links.sort(key=lambda each: (each.source, -len(each.anchor.split()), -each.cosine, each.target))
    counts = Counter[int]()
    kept = []
    for link in links:
        counts[link.source] += 1
        if counts[link.source] <= _MOST:
            kept.append(link)
    return kept


def _anchors(contents: Sequence[Content], among: Sequence[int], same: Mapping[int, int]) -> dict[tuple[str, ...], int]:
    """Maps each phrase that occurs in the title or headline of only one page to that page."""
    owners: dict[tuple[str, ...], int | None] = {}
    long_enough = set[tuple[str, ...]]()
    for page in among:
        owner = same.get(page, page)
        for text in (contents[page].title, contents[page].headline):
            words = words_of(text)
            least = _MOST_OF_TITLE * sum(word not in _STOP for word in words)
            for phrase in _phrases(words):
                owners[phrase] = owner if owners.setdefault(phrase, owner) == owner else None
                if sum(word not in _STOP for word in phrase) >= least:
                    long_enough.add(phrase)
    return {phrase: owner for phrase, owner in owners.items() if owner is not None and phrase in long_enough}


def _phrases(words: Sequence[str]) -> Iterable[tuple[str, ...]]:
    """Yields runs of words that neither begin nor end with a stop word."""
    means = [word not in _STOP and len(word) > 1 for word in words]
    for start in range(len(words)):
        if not means[start]:
            continue
        for end in range(start + _MIN_WORDS, min(len(words), start + _MAX_WORDS) + 1):
            if means[end - 1]:
                yield tuple(words[start:end])


def _as_written(phrase: str, sentence: str) -> tuple[str, str]:
    """Returns the anchor text as it is spelled in the sentence, and the sentence."""
    folded, words = sentence.casefold(), phrase.split()
    start = folded.find(words[0])
    while start >= 0:
        end = start
        for word in words:
            end = folded.find(word, end)
            if end < 0:
                break
            end += len(word)
        if end > 0 and words_of(sentence[start:end]) == words:
            return sentence[start:end], sentence
        start = folded.find(words[0], start + 1)
    return phrase, sentence
