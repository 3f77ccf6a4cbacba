"""What a check is, and the checks of a text: plain rules that anybody can do by hand.

Nothing here is learned, and nothing here is ever added to what a model says: a check is passed or it is not, tells what
it found, and what to do. Where a rule cannot be applied (a formula for English, a German page) it says so instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from unisono.formatting import format_count
from unisono.recipes.seo.site.language import is_english

SHORTEST_TEXT = 100
"""Words; a page with fewer says little that a search could find."""
FIRST_WORDS = 100
"""What counts as the beginning of a text."""
LOWEST_EASE = 50.0
"""Flesch's scale: 60 to 70 is plain English, below 50 he calls it difficult."""
LARGEST_SHARE = 0.05
"""Of the words of a text that one keyword may be, before it reads as repetition."""

_FEWEST_TO_MEASURE = 30
# Writing without spaces: every sign of Chinese and Japanese counts as a word.
_NO_SPACES = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
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
    """One rule, applied: whether it is kept, what was found, and what to do."""

    name: str
    passed: bool | None
    """None: it could not be measured, and `found` says why."""
    found: str
    advice: str = ""
    """What to do; empty where there is nothing to do."""

    @property
    def failed(self) -> bool:
        """Whether something is to be done."""
        return self.passed is False


def check_text(text: str, keywords: Sequence[str] = (), lang: str = "en") -> list[Check]:
    """The checks of a plain text: its length, how easily it reads, and where the keywords stand."""
    return [
        length_check(text),
        readability_check(text, lang),
        *(_keyword_in_text(text, keyword) for keyword in keywords if words_of(keyword)),
    ]


def words_of(text: str) -> list[str]:
    """The words, in lower case; a hyphen parts them."""
    return _WORD.findall(text.casefold())


def num_sentences(text: str) -> int:
    """How many sentences: they end with a stop before a space, or with an empty line."""
    return sum(bool(_WORD.search(part)) for part in _SENTENCE_END.split(text)) or 1


@lru_cache(maxsize=20_000)
def num_syllables(word: str) -> int:
    """The syllables of an English word by its spelling: groups of vowels, less the silent e. A rule of thumb."""
    letters = "".join(sign for sign in word.casefold() if "a" <= sign <= "z")
    number = len(_VOWELS.findall(letters)) + len(_TWO_VOWELS.findall(letters)) - bool(_SILENT.search(letters))
    return max(1, number)


def reading_ease(text: str) -> float:
    """Flesch's reading ease of an English text: 100 very easy, 0 very hard (Flesch 1948)."""
    # A number is read by its figures, not by its spelling.
    words = [word for word in words_of(text) if any(sign.isalpha() for sign in word)] or ["a"]
    syllables = sum(num_syllables(word) for word in words)
    return 206.835 - 1.015 * len(words) / num_sentences(text) - 84.6 * syllables / len(words)


def length_check(text: str) -> Check:
    """Whether there is enough text."""
    number = len(words_of(text))
    advice = f"Write at least {SHORTEST_TEXT} words on what the page is about, or join it with another."
    found = format_count(number, "word")
    return Check("text length", number >= SHORTEST_TEXT, found, "" if number >= SHORTEST_TEXT else advice)


def readability_check(text: str, lang: str | None) -> Check:
    """How easily an English text reads; of other languages it says that it does not know."""
    if not lang or not re.match(r"en\b", lang, re.IGNORECASE):
        which = f"the page is in {lang[:20]!r}" if lang else "the page does not say its language"
        return Check("readability", None, f"not measured: Flesch's formula is for English, {which}")
    # Menus and tables are not read as sentences, and would make any page look easy.
    prose = "\n\n".join(part for part in text.split("\n\n") if _SENTENCE_END.search(part))
    if len(words_of(prose)) < _FEWEST_TO_MEASURE:
        return Check("readability", None, f"not measured: fewer than {_FEWEST_TO_MEASURE} words in sentences")
    if not is_english(prose, words_of(prose)):
        return Check(
            "readability", None, "not measured: the text is not in English, and Flesch's formula is for English"
        )
    ease = reading_ease(prose)
    advice = "Write shorter sentences and shorter words." if ease < LOWEST_EASE else ""
    return Check("readability", ease >= LOWEST_EASE, f"reading ease {ease:.0f} (Flesch, by a rule of thumb)", advice)


def stands_in(keyword: str, text: str) -> bool:
    """Whether every word of the keyword is among the words of the text, as written: `run` is not `running`."""
    return set(words_of(keyword)) <= set(words_of(text))


def first_words(text: str) -> str:
    """The beginning of a text."""
    return " ".join(words_of(text[: FIRST_WORDS * 100])[:FIRST_WORDS])


def share_of(keyword: str, text: str) -> tuple[int, float]:
    """How often a keyword stands in a text, its words one after the other, and which share of all words that is."""
    wanted, words = words_of(keyword), words_of(text)
    size = len(wanted)
    times = sum(words[at : at + size] == wanted for at in range(len(words) - size + 1)) if size else 0
    return times, times * size / len(words) if words else 0.0


def share_text(times: int, share: float) -> str:
    """3 times, 1.2 % of the words."""
    return f"{format_count(times, 'time')}, {share:.1%} of the words".replace("%", " %")


def repeated(times: int, share: float) -> bool:
    """Whether a keyword stands there so often that it reads as repetition."""
    return times >= 5 and share > LARGEST_SHARE


def _keyword_in_text(text: str, keyword: str) -> Check:
    times, share = share_of(keyword, text)
    begins = stands_in(keyword, first_words(text))
    found = f"{'' if begins else 'not '}in the first {FIRST_WORDS} words; {share_text(times, share)}"
    if repeated(times, share):
        advice = "Say it less often: it reads as repetition."
    elif not begins:
        advice = "If the text is about this, say so in its beginning, in these words."
    else:
        advice = ""
    return Check(f"keyword: {keyword.strip()}", not advice, found, advice)
