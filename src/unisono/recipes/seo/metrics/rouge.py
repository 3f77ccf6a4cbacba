"""What a written title or description is worth: how much of the true one is in it, and what can be checked of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

LONGEST = {"title": 60, "description": 155}
"""Characters that search engines show of each."""

_SIGNS = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # written without spaces: each is a word
_WORD = re.compile(rf"[{_SIGNS}]|[^\W_{_SIGNS}]+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_SENTENCE = re.compile(r".+?[.!?。！？](?=\s|$)|.+", re.DOTALL)


def words_of(text: str) -> list[str]:
    """Its words, without regard to capitals and punctuation."""
    return _WORD.findall(text.casefold())


def rouge_l(written: str, true: str) -> float:
    """ROUGE-L (Lin 2004) as an F-measure: the longest run of common words in order, gaps allowed; from 0 to 1."""
    ours, theirs = words_of(written), words_of(true)
    common = longest_common(ours, theirs)
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def longest_common(first: Sequence[str], second: Sequence[str]) -> int:
    """The length of the longest sequence that both contain in order, gaps allowed."""
    row = [0] * (len(second) + 1)
    for word in first:
        before = 0  # the entry to the left in the row above
        for place, other in enumerate(second, 1):
            before, row[place] = row[place], before + 1 if word == other else max(row[place], row[place - 1])
    return row[-1]


def copied_numbers(written: str, page: str) -> tuple[int, int]:
    """How many of the numbers in what is written stand in the page, and how many there are: others are invented."""
    there, used = set(_NUMBER.findall(page)), _NUMBER.findall(written)
    return sum(number in there for number in used), len(used)


def lead_of(page: str) -> str:
    """The first sentence of a page: what anybody could show without a model."""
    found = _SENTENCE.match(page.strip())
    return " ".join(found.group().split()) if found else ""


def cut(text: str, most: int) -> str:
    """A text cut to so many characters, between words where that leaves any."""
    if len(text) <= most:
        return text
    whole, _, rest = text[: most + 1].rpartition(" ")
    return whole or rest[:most]
