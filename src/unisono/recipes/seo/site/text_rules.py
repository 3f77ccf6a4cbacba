"""Checks a text with fixed rules that anybody can verify by hand.

Nothing here is learned or combined with a model's score. A check reports what it found and what to do. If a rule does
not apply, such as an English readability formula to a German page, the check reports that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from unisono.formatting import format_count
from unisono.recipes.seo.site.language import is_english

MIN_WORDS = 100
"""Minimum number of words; shorter texts fail the check, because searches rarely find them."""
FIRST_WORDS = 100
"""Number of words that count as the beginning of a text."""
MIN_READING_EASE = 50.0
"""Lowest Flesch reading ease that passes. 60 to 70 is plain English; below 50 is difficult."""
MAX_SHARE = 0.05
"""Maximum fraction of a text's words that a keyword may make up; more counts as repetition."""

_MIN_WORDS_TO_MEASURE = 30
_NO_SPACES = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Chinese and Japanese: every character is a word
_WORD = re.compile(rf"[{_NO_SPACES}]|[^\W_{_NO_SPACES}]+(?:['’][^\W_{_NO_SPACES}]+)*")
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s|$)|[。！？]|\n\s*\n")
_VOWELS = re.compile(r"[aeiouy]+")
_TWO_VOWELS = re.compile(r"(?<![ctsgxln])i[aou]|(?<![ctr])ien|(?<![pg])eo(?!u)|[aeiouy]ing$|[^aeiouy]ism$")
_SILENT = re.compile(
    r"[aeiouy][^aeiouy]+e(?:ly|ful|less|ness)$|[aeiouy][^aeiouyl]+ements?$"
    r"|[^aeiouy](?<![^aeiouy]l)e$|[^aeiouytd]ed$|[^aeiouysxzcg](?<!ch)(?<!sh)(?<![^aeiouy]l)es$"
)


@dataclass(frozen=True)
class Check:
    """The result of one rule."""

    name: str
    passed: bool | None
    """Whether the page passed; None if the rule could not be applied, with the reason in `found`."""
    found: str
    advice: str = ""
    """Advice for the user; empty if there is nothing to do."""

    @property
    def failed(self) -> bool:
        """Whether the page failed this check."""
        return self.passed is False


def check_text(text: str, keywords: Sequence[str] = (), lang: str = "en") -> list[Check]:
    """Checks the length and readability of a text, and where the keywords occur."""
    return [
        length_check(text),
        readability_check(text, lang),
        *(_keyword_check(text, keyword) for keyword in keywords if words_of(keyword)),
    ]


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case; hyphens separate words."""
    return _WORD.findall(text.casefold())


def num_sentences(text: str) -> int:
    """Counts sentences, which end with punctuation before a space, or with an empty line."""
    return sum(bool(_WORD.search(part)) for part in _SENTENCE_END.split(text)) or 1


@lru_cache(maxsize=20_000)
def num_syllables(word: str) -> int:
    """Estimates the number of syllables of an English word from its spelling."""
    letters = "".join(sign for sign in word.casefold() if "a" <= sign <= "z")
    number = len(_VOWELS.findall(letters)) + len(_TWO_VOWELS.findall(letters)) - bool(_SILENT.search(letters))
    return max(1, number)


def reading_ease(text: str) -> float:
    """Computes the Flesch reading ease of an English text: 100 very easy, 0 very difficult (Flesch 1948)."""
    words = [word for word in words_of(text) if any(sign.isalpha() for sign in word)] or ["a"]  # numbers do not count
    syllables = sum(num_syllables(word) for word in words)
    return 206.835 - 1.015 * len(words) / num_sentences(text) - 84.6 * syllables / len(words)


def length_check(text: str) -> Check:
    """Checks whether there is enough text."""
    number = len(words_of(text))
    advice = f"Write at least {MIN_WORDS} words about the topic, or merge the page with another."
    return Check(
        "text length", number >= MIN_WORDS, format_count(number, "word"), "" if number >= MIN_WORDS else advice
    )


def readability_check(text: str, lang: str | None) -> Check:
    """Checks the readability of an English text; does not apply to other languages."""
    if not lang or not re.match(r"en\b", lang, re.IGNORECASE):
        reason = f"the page is in {lang[:20]!r}" if lang else "the page does not declare its language"
        return Check("readability", None, f"not measured: Flesch's formula is for English, {reason}")
    # Ignores menus and tables, which contain no sentences and would make any page look easy to read.
    prose = "\n\n".join(part for part in text.split("\n\n") if _SENTENCE_END.search(part))
    if len(words_of(prose)) < _MIN_WORDS_TO_MEASURE:
        return Check("readability", None, f"not measured: fewer than {_MIN_WORDS_TO_MEASURE} words in sentences")
    if not is_english(prose, words_of(prose)):
        reason = "not measured: the text is not in English, and Flesch's formula is for English"
        return Check("readability", None, reason)
    ease = reading_ease(prose)
    advice = "Use shorter sentences and shorter words." if ease < MIN_READING_EASE else ""
    return Check("readability", ease >= MIN_READING_EASE, f"Flesch reading ease about {ease:.0f}", advice)


def contains(text: str, keyword: str) -> bool:
    """Returns whether the text contains every word of the keyword, without stemming."""
    return set(words_of(keyword)) <= set(words_of(text))


def first_words(text: str) -> str:
    """Returns the first FIRST_WORDS words of a text."""
    return " ".join(words_of(text[: FIRST_WORDS * 100])[:FIRST_WORDS])


def frequency(keyword: str, text: str) -> tuple[int, float]:
    """Returns how often a keyword occurs in a text as a phrase, and what fraction of the text's words it makes up."""
    phrase, words = words_of(keyword), words_of(text)
    size = len(phrase)
    count = sum(words[at : at + size] == phrase for at in range(len(words) - size + 1)) if size else 0
    return count, count * size / len(words) if words else 0.0


def frequency_text(count: int, share: float) -> str:
    """Formats a keyword's frequency, such as "3 times, 1.2 % of the words"."""
    return f"{format_count(count, 'time')}, {100 * share:.1f} % of the words"


def is_stuffed(count: int, share: float) -> bool:
    """Returns whether a keyword occurs so often that it reads as repetition."""
    return count >= 5 and share > MAX_SHARE


def _keyword_check(text: str, keyword: str) -> Check:
    count, share = frequency(keyword, text)
    at_beginning = contains(first_words(text), keyword)
    description = f"{'' if at_beginning else 'not '}in the first {FIRST_WORDS} words; {frequency_text(count, share)}"
    if is_stuffed(count, share):
        advice = "Use it less often; it reads as repetition."
    elif not at_beginning:
        advice = "If the text is about this keyword, use its words at the beginning."
    else:
        advice = ""
    return Check(f"keyword: {keyword.strip()}", not advice, description, advice)
