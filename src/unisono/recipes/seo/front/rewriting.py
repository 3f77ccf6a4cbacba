"""Changes to a text that say nothing new: its own sentences in another order, without repetition, in shorter pieces.

Nothing is written here. Every word of a changed text stands in the text as it was, and none more often, so no fact can
be invented and no keyword appended; `says_nothing_new` is asked about every change before it is proposed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from unisono.recipes.seo.site.text_rules import words_of

LONG = 25
"""Words; a longer sentence is proposed to be split, where it has a seam."""
LONGEST_TITLE = 60
"""Characters that search pages show of a title."""
_ALIKE = 0.9  # share of common words above which two sentences say the same
_SHORT = 4  # words; shorter sentences are too little to be told apart, or to stand alone

_BREAK = re.compile(r"(\s*\n\s*)")
_END = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+(?=[\"'“‘(\[]?[A-Z0-9ÀÖØ-Þ])|(?<=[。！？])")
_ABBREVIATION = re.compile(
    r"(?:\b(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|No|vs|etc|e\.g|i\.e|cf|Fig|approx|Inc|Ltd|Jr|Sr)|\b(?:[A-Za-z]\.)+[A-Za-z])\.$"
)
# A seam is where two whole clauses meet: a semicolon, or a conjunction before a word that begins a clause.
_SEAM = re.compile(r";\s+|,\s+(?:and|but|so)\s+(?=(?:it|they|we|you|he|she|this|these|those|there)\s)", re.IGNORECASE)
# What begins like this leans on the sentence before it, and cannot be moved away from it.
_LEANING = re.compile(
    r"(?:it|its|they|their|this|that|these|those|he|she|his|her|such|here|then|so|and|but|or|also|however|therefore|thus"
    r"|instead|otherwise|moreover|furthermore|finally|both|another|first|second|third|for example|in addition)\b",
    re.IGNORECASE,
)
_CLAUSE_END = re.compile(r"\s[-–—]\s|[:;]\s|\s\(")


@dataclass(frozen=True)
class Proposal:
    """One change: what it is, why, and the text after it."""

    kind: str
    why: str
    before: str
    after: str
    text: str


def sentences_of(paragraph: str) -> list[str]:
    """The sentences of a paragraph."""
    found: list[str] = []
    for piece in _END.split(paragraph.strip()):
        if found and _ABBREVIATION.search(found[-1]):
            found[-1] += f" {piece}"
        elif piece.strip():
            found.append(piece.strip())
    return found


def says_nothing_new(text: str, changed: str) -> bool:
    """Whether every word and number of the changed text stands in the text, as often at least."""
    return not Counter(words_of(changed)) - Counter(words_of(text))


def proposals(text: str, keywords: Sequence[str]) -> Iterator[Proposal]:
    """Changes to this text, each by itself: repetition out, the answer first, long sentences split."""
    lines, there = _Lines.of(text), Counter(words_of(text))
    # One at a time: each holds the whole text, and a caller who keeps the first needs no other.
    for made in chain(_without_repetition(lines), _answer_first(lines, keywords), _shorter(lines)):
        if made.text != text and not Counter(words_of(made.text)) - there:
            yield made


@dataclass(frozen=True)
class _Lines:
    """A text as lines of sentences, and what stands between the lines: a list stays a list."""

    sentences: list[list[str]]
    breaks: list[str]

    @classmethod
    def of(cls, text: str) -> _Lines:
        pieces = _BREAK.split(text.strip())
        return cls([sentences_of(line) for line in pieces[::2]], pieces[1::2])

    def joined(self, place: int, line: list[str], first: str | None = None) -> str:
        """The text with another line in one place, and with a sentence before all others."""
        return self.without({place: line}, first)

    def without(self, others: Mapping[int, list[str]], first: str | None = None) -> str:
        """The text with other lines in these places, and with a sentence before all others."""
        lines = [others.get(place, line) for place, line in enumerate(self.sentences)]
        if first is not None:
            lines[0] = [first, *lines[0]]
        pairs = zip(lines, [*self.breaks, ""], strict=True)
        return "".join(" ".join(sentences) + after for sentences, after in pairs if sentences).strip()


def _without_repetition(lines: _Lines) -> Iterator[Proposal]:
    """Without each sentence that says what one before it said; without all its exact copies at once."""
    for copies, twin in _repetitions(lines):
        left: dict[int, list[str]] = {}
        for place in {place for place, _ in copies}:
            left[place] = [each for number, each in enumerate(lines.sentences[place]) if (place, number) not in copies]
        place, number = min(copies)
        times = f" ({len(copies):,} times)" if len(copies) > 1 else ""
        why = f"it says again{times}: {twin}"
        yield Proposal("repetition", why, lines.sentences[place][number], "", lines.without(left))


def _repetitions(lines: _Lines) -> Iterator[tuple[set[tuple[int, int]], str]]:
    """Where each repeated sentence and its exact copies stand, and the sentence that said the same before."""
    places: dict[str, list[tuple[int, int]]] = {}
    for place, line in enumerate(lines.sentences):
        for number, sentence in enumerate(line):
            if len(words_of(sentence)) >= _SHORT:
                places.setdefault(sentence, []).append((place, number))
    found: dict[str, tuple[set[tuple[int, int]], str]] = {}
    seen = _Seen(places)
    for sentence, where in places.items():
        twin = seen.twin_of(sentence)
        if twin is not None:
            found[sentence] = set(where), twin
        elif len(where) > 1:
            found[sentence] = set(where[1:]), sentence
        if twin is None:
            seen.add(sentence)
    yield from sorted(found.values(), key=lambda each: min(each[0]))


class _Seen:
    """Sentences, of which one that says the same as another is found without comparing with each of them.

    Two sentences that share 90 % of their words cannot differ in all of the rarest words of either: only sentences that
    share one of those are compared (prefix filtering), only if enough words follow it in both (positional filtering),
    and only if both have the same numbers. A repeated word counts as a word of its own each time.
    """

    def __init__(self, sentences: Iterable[str]) -> None:
        self._words = {sentence: Counter(words_of(sentence)) for sentence in sentences}
        self._often = Counter(_counted(word, time) for words in self._words.values() for word, time in _times(words))
        self._order = {sentence: place for place, sentence in enumerate(self._words)}
        # (numbers, word) -> (how many words follow it, length of the sentence) -> sentences
        self._with: dict[tuple[frozenset[str], str], dict[tuple[int, int], list[str]]] = {}

    def add(self, sentence: str) -> None:
        """Remembers a sentence."""
        for key, follow, length in self._rarest(sentence):
            self._with.setdefault(key, {}).setdefault((follow, length), []).append(sentence)

    def twin_of(self, sentence: str) -> str | None:
        """The first of the added sentences that says the same."""
        candidates: set[str] = set()
        for key, follow, length in self._rarest(sentence):
            for (follow_there, length_there), others in self._with.get(key, {}).items():
                least = _ALIKE / (1 + _ALIKE) * (length + length_there)  # common words of two that are alike
                if 1 + min(follow, follow_there) >= least - 1e-9:  # if it is the first word that they share
                    candidates.update(others)
        alike = (other for other in candidates if _alike(self._words[sentence], self._words[other]))
        return min(alike, key=self._order.__getitem__, default=None)

    def _rarest(self, sentence: str) -> Iterator[tuple[tuple[frozenset[str], str], int, int]]:
        """The rarest words, rarest first, each with the number of words after it and the length of the sentence."""
        words = [_counted(word, time) for word, time in _times(self._words[sentence])]
        words.sort(key=lambda word: (self._often[word], word))
        numbers, length = _numbers(self._words[sentence]), len(words)
        for place, word in enumerate(words[: length - math.ceil(_ALIKE * length) + 1]):
            yield (numbers, word), length - place - 1, length


def _times(words: Counter[str]) -> Iterator[tuple[str, int]]:
    return ((word, time) for word, times in words.items() for time in range(times))


def _counted(word: str, time: int) -> str:
    return f"{word} {time}" if time else word


def _alike(one: Counter[str], other: Counter[str]) -> bool:
    common = sum((one & other).values())
    return _numbers(one) == _numbers(other) and common >= _ALIKE * sum((one | other).values())


def _numbers(words: Iterable[str]) -> frozenset[str]:
    return frozenset(word for word in words if any(sign.isdigit() for sign in word))


def _answer_first(lines: _Lines, keywords: Sequence[str]) -> Iterator[Proposal]:
    """The sentence that has most of the keywords' words goes to the front, unless the first one has as many."""
    wanted = {word for keyword in keywords for word in words_of(keyword)}
    flat = [(place, number) for place, line in enumerate(lines.sentences) for number in range(len(line))]
    if not wanted or not flat:
        return

    def covered(where: tuple[int, int]) -> int:
        return len(wanted & set(words_of(lines.sentences[where[0]][where[1]])))

    place, number = best = max(flat, key=covered)  # the first of equals
    line = lines.sentences[place]
    sentence = line[number]
    if best == flat[0] or covered(best) <= covered(flat[0]) or len(words_of(sentence)) < _SHORT:
        return
    if any(_LEANING.match(each) for each in line[number : number + 2]) or sentence[-1] not in ".!?…。！？":
        return
    text = lines.joined(place, line[:number] + line[number + 1 :], first=sentence)
    yield Proposal("answer first", f"it is the sentence about {', '.join(keywords)}", sentence, sentence, text)


def _shorter(lines: _Lines) -> Iterator[Proposal]:
    for place, line in enumerate(lines.sentences):
        for number, sentence in enumerate(line):
            num = len(words_of(sentence))
            seams = [
                seam
                for seam in _SEAM.finditer(sentence)
                if min(len(words_of(sentence[: seam.start()])), len(words_of(sentence[seam.end() :]))) >= _SHORT
            ]
            if num <= LONG or not seams:
                continue
            seam = min(seams, key=lambda each: abs(each.start() - len(sentence) / 2))
            second = sentence[seam.end() :]
            parts = [f"{sentence[: seam.start()]}.", second[0].upper() + second[1:]]
            text = lines.joined(place, line[:number] + parts + line[number + 1 :])
            yield Proposal("split", f"{num} words in one sentence", sentence, " ".join(parts), text)


def titles(text: str, keywords: Sequence[str], most: int = 10) -> list[str]:
    """Pieces of the text's own sentences that are short enough for a title; those with most of the keywords first."""
    wanted = {word for keyword in keywords for word in words_of(keyword)}
    found: dict[str, int] = {}
    for line in _Lines.of(text).sentences:
        for sentence in line:
            for piece in (sentence, *_CLAUSE_END.split(sentence)):
                title = piece.strip(" \t\n.;:,-–—")
                if len(words_of(title)) >= _SHORT - 1 and len(title) <= LONGEST_TITLE and not _LEANING.match(title):
                    found.setdefault(title, len(wanted & set(words_of(title))))
    return sorted((title for title in found if found[title]), key=lambda title: -found[title])[:most]
