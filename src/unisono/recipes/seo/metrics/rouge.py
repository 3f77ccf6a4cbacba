"""Metrics of generated titles and descriptions.

ROUGE-L is our own, because rouge-score 0.1.2 tokenizes ASCII only (identical Russian titles score 0), is a third slower
and installs 15 MB of nltk for these twenty lines. On English text both agree to 1e-15.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_CHARACTERS = {"title": 60, "description": 155}
"""Characters that search engines show."""

_SIGNS = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # scripts without spaces: every character is a word
_WORD = re.compile(rf"[{_SIGNS}]|[^\W_{_SIGNS}]+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_SENTENCE = re.compile(r".+?[.!?。！？](?=\s|$)|.+", re.DOTALL)


def words_of(text: str) -> list[str]:
    """The words of a text, ignoring case and punctuation."""
    return _WORD.findall(text.casefold())


def rouge_l(written: str, true: str) -> float:
    """ROUGE-L (Lin 2004) as an F-measure from 0 to 1, based on the longest common subsequence of words."""
    ours, theirs = words_of(written), words_of(true)
    common = longest_common(ours, theirs)
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def longest_common(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for word in first:
        before = 0  # entry of the previous row to the left
        for place, other in enumerate(second, 1):
            before, row[place] = row[place], before + 1 if word == other else max(row[place], row[place - 1])
    return row[-1]


def copied_numbers(written: str, page: str) -> tuple[int, int]:
    """How many numbers of the generated text occur in the page, and how many numbers it has."""
    there, used = set(_NUMBER.findall(page)), _NUMBER.findall(written)
    return sum(number in there for number in used), len(used)


def lead_of(page: str) -> str:
    """The first sentence of a page, which is the baseline."""
    sentence = _SENTENCE.match(page.strip())
    return " ".join(sentence.group().split()) if sentence else ""


def cut(text: str, most: int) -> str:
    """Truncates a text, between words if possible."""
    if len(text) <= most:
        return text
    whole, _, rest = text[: most + 1].rpartition(" ")
    return whole or rest[:most]
