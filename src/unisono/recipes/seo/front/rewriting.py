"""Proposes changes that add no words: moves a sentence, drops repeated sentences, and splits long sentences.

Every word of a changed text occurs at least as often in the original, so no change can invent a fact or repeat a
keyword. `adds_nothing` checks every change before it is proposed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from unisono.recipes.seo.site.text_rules import words_of

_LONG = 25  # sentences with more words are split between two clauses
_SHORT = 4  # sentences with fewer words are neither compared nor moved
_MAX_CHANGES = 50
_TOLERANCE = 1e-6  # score differences below this are rounding errors

_BREAK = re.compile(r"(\s*\n\s*)")
_END = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+(?=[\"'“‘(\[]?[A-Z0-9ÀÖØ-Þ])|(?<=[。！？])")
_ABBREVIATION = re.compile(
    r"(?:\b(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|No|vs|etc|e\.g|i\.e|cf|Fig|approx|Inc|Ltd|Jr|Sr)|\b(?:[A-Za-z]\.)+[A-Za-z])\.$"
)
# A boundary between two clauses: a semicolon, or a conjunction before a word that begins a clause.
_SEAM = re.compile(r";\s+|,\s+(?:and|but|so)\s+(?=(?:it|they|we|you|he|she|this|these|those|there)\s)", re.IGNORECASE)
# A sentence that begins like this refers to the previous one, so the two stay together.
_REFERRING = re.compile(
    r"(?:it|its|they|their|this|that|these|those|he|she|his|her|such|here|then|so|and|but|or|also|however|therefore|thus"
    r"|instead|otherwise|moreover|furthermore|finally|both|another|first|second|third|for example|in addition)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Change:
    """A proposed change: its kind and reason, the sentence before and after it, and the whole text after it."""

    kind: str
    why: str
    before: str
    after: str
    text: str


def improve(
    text: str, keywords: Sequence[str], score_of: Callable[[str], float] | None
) -> tuple[str, float | None, list[dict[str, Any]]]:
    """Applies changes that do not lower the score; returns the text, its score, and all changes that were tried.

    Without a score function, changes are listed but not applied.
    """
    changes, tried = list[dict[str, Any]](), set[str]()
    score = score_of(text) if score_of else None
    candidates = proposals(text, keywords)
    while len(tried) < _MAX_CHANGES:
        change = next((each for each in candidates if each.text not in tried), None)
        if change is None:
            break
        tried.add(change.text)
        after = score_of(change.text) if score_of else None
        applied = score is not None and after is not None and after >= score - _TOLERANCE
        description = {"kind": change.kind, "why": change.why, "before": change.before, "after": change.after}
        changes.append({**description, "score_before": score, "score_after": after, "kept": applied})
        if applied:
            text, score = change.text, after
            candidates = proposals(text, keywords)
    return text, score, changes


def proposals(text: str, keywords: Sequence[str]) -> Iterator[Change]:
    """Yields independent changes: drop repeated sentences, move the answer to the front, split long sentences."""
    lines = _Lines.of(text)
    for change in chain(_without_repetition(lines), _answer_first(lines, keywords), _split(lines)):
        if change.text != text and adds_nothing(text, change.text):
            yield change


def adds_nothing(text: str, changed: str) -> bool:
    """Returns whether every word and number of the changed text occurs at least as often in the original text."""
    return not Counter(words_of(changed)) - Counter(words_of(text))


def sentences_of(paragraph: str) -> list[str]:
    """Returns the sentences of a paragraph."""
    sentences: list[str] = []
    for piece in _END.split(paragraph.strip()):
        if sentences and _ABBREVIATION.search(sentences[-1]):
            sentences[-1] += f" {piece}"
        elif piece.strip():
            sentences.append(piece.strip())
    return sentences


@dataclass(frozen=True)
class _Lines:
    """A text as lines of sentences; preserves the white space between lines, so a list stays a list."""

    sentences: list[list[str]]
    breaks: list[str]

    @classmethod
    def of(cls, text: str) -> _Lines:
        pieces = _BREAK.split(text.strip())
        return cls([sentences_of(line) for line in pieces[::2]], pieces[1::2])

    def replaced(self, new_lines: Mapping[int, list[str]], first: str | None = None) -> str:
        """Returns the text with these lines replaced, and with `first` at its beginning."""
        lines = [new_lines.get(number, line) for number, line in enumerate(self.sentences)]
        if first is not None:
            lines[0] = [first, *lines[0]]
        pairs = zip(lines, [*self.breaks, ""], strict=True)
        return "".join(" ".join(sentences) + after for sentences, after in pairs if sentences).strip()


def _without_repetition(lines: _Lines) -> Iterator[Change]:
    """Drops later copies of a sentence: sentences with the same words, in any order, and the same numbers."""
    positions: dict[frozenset[tuple[str, int]], list[tuple[int, int]]] = {}
    for number, line in enumerate(lines.sentences):
        for place, sentence in enumerate(line):
            words = Counter(words_of(sentence))
            if words.total() >= _SHORT:
                positions.setdefault(frozenset(words.items()), []).append((number, place))
    for (number, place), *copies in positions.values():
        if not copies:
            continue
        dropped = set(copies)
        shorter = {
            line: [each for at, each in enumerate(lines.sentences[line]) if (line, at) not in dropped]
            for line in {line for line, _ in copies}
        }
        sentence = lines.sentences[number][place]
        times = f" {len(copies):,} times" if len(copies) > 1 else ""
        yield Change("repetition", f"repeats{times}: {sentence}", sentence, "", lines.replaced(shorter))


def _answer_first(lines: _Lines, keywords: Sequence[str]) -> Iterator[Change]:
    """Moves the sentence with the most keywords to the front, unless the first sentence has as many."""
    keyword_words = {word for keyword in keywords for word in words_of(keyword)}
    places = [(number, place) for number, line in enumerate(lines.sentences) for place in range(len(line))]
    if not keyword_words or not places:
        return

    def num_covered(where: tuple[int, int]) -> int:
        return len(keyword_words & set(words_of(lines.sentences[where[0]][where[1]])))

    number, place = best = max(places, key=num_covered)
    line = lines.sentences[number]
    sentence = line[place]
    if num_covered(best) <= num_covered(places[0]) or len(words_of(sentence)) < _SHORT:
        return
    if any(_REFERRING.match(each) for each in line[place : place + 2]) or sentence[-1] not in ".!?…。！？":
        return
    text = lines.replaced({number: line[:place] + line[place + 1 :]}, first=sentence)
    yield Change("answer first", f"it is the sentence about {', '.join(keywords)}", sentence, sentence, text)


def _split(lines: _Lines) -> Iterator[Change]:
    """Splits a long sentence at the clause boundary nearest to its middle."""
    for number, line in enumerate(lines.sentences):
        for place, sentence in enumerate(line):
            num_words = len(words_of(sentence))
            seams = [
                seam
                for seam in _SEAM.finditer(sentence)
                if min(len(words_of(sentence[: seam.start()])), len(words_of(sentence[seam.end() :]))) >= _SHORT
            ]
            if num_words <= _LONG or not seams:
                continue
            seam = min(seams, key=lambda each: abs(each.start() - len(sentence) / 2))
            second = sentence[seam.end() :]
            parts = [f"{sentence[: seam.start()]}.", second[0].upper() + second[1:]]
            text = lines.replaced({number: line[:place] + parts + line[place + 1 :]})
            yield Change("split", f"the sentence has {num_words} words", sentence, " ".join(parts), text)
