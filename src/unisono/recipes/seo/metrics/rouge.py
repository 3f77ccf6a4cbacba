"""Metrics of generated titles and descriptions.

unisono has its own implementation of ROUGE-L, because rouge-score 0.1.2 tokenizes only ASCII (identical Russian titles
score 0), is a third slower, and depends on nltk (15 MB). On English text both agree to 1e-15.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_CHARACTERS = {"title": 60, "description": 155}
"""Number of characters that search engines show."""

_SIGNS = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # scripts without spaces: every character is a word
_WORD = re.compile(rf"[{_SIGNS}]|[^\W_{_SIGNS}]+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_SENTENCE = re.compile(r".+?[.!?。！？](?=\s|$)|.+", re.DOTALL)


def words_of(text: str) -> list[str]:
    """Returns the words of a text, in lower case and without punctuation."""
    return _WORD.findall(text.casefold())


def rouge_l(written: str, true: str) -> float:
    """Returns the ROUGE-L F-measure (Lin 2004), from 0 to 1, of the longest common subsequence of words."""
    words, true_words = words_of(written), words_of(true)
    common = longest_common(words, true_words)
    return 2 * common / (len(words) + len(true_words)) if common else 0.0


def longest_common(first: Sequence[str], second: Sequence[str]) -> int:
    """Returns the length of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for word in first:
        before = 0  # entry of the previous row, one column to the left
        for place, other in enumerate(second, 1):
            before, row[place] = row[place], before + 1 if word == other else max(row[place], row[place - 1])
    return row[-1]


def copied_numbers(written: str, page: str) -> tuple[int, int]:
    """Returns how many numbers in the generated text also occur in the page, and how many numbers it contains."""
    on_page, used = set(_NUMBER.findall(page)), _NUMBER.findall(written)
    return sum(number in on_page for number in used), len(used)


def lead_of(page: str) -> str:
    """Returns the first sentence of a page, which is the baseline."""
    sentence = _SENTENCE.match(page.strip())
    return " ".join(sentence.group().split()) if sentence else ""


def cut(text: str, most: int) -> str:
    """Truncates a text, between words if possible."""
    if len(text) <= most:
        return text
    whole, _, rest = text[: most + 1].rpartition(" ")
    return whole or rest[:most]
