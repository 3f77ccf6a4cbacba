"""Detects whether a text is in English, by its letters and common words. A doubtful text counts as English."""

from __future__ import annotations

from collections.abc import Sequence

# Words that also exist in other languages are left out: a, in, of, is, was, on, so, an, me, no, he.
_ENGLISH_WORDS = """
    the and to that it for with you this are be from have not by they your but what which when will can their if
    there how has been its our who would about more other than these those into only any does because while each
    every some where then them she his her us my should could may after before between through during without
"""
# German, Dutch, French, Spanish, Italian, Portuguese, Scandinavian languages; Indonesian, Tagalog, Swahili.
_OTHER_WORDS = """
    der die das und nicht ist ein eine den von zu mit sich auf für dem des im auch es wird sie wir ich als bei nach
    het een van niet dat voor met zijn aan ook te en op om worden deze naar
    le la les des est une dans pour que qui sur avec pas du et ce elle nous vous au sont plus par
    el los las para por con del se lo como su y al más pero
    il di che non per sono una della nel si gli è anche come
    não uma os dos com mais ao na da seu
    och att det som är av på og ikke til jeg har ett för
    yang dan untuk dengan ini dari pada ke itu ang ng sa ya wa kwa
"""
_ENGLISH, _OTHERS = frozenset(_ENGLISH_WORDS.split()), frozenset(_OTHER_WORDS.split())
_ENOUGH = 0.08  # fraction of common English words in the text; prose has about 0.2
_FOREIGN_LETTERS = 0.02  # fraction of non-ASCII letters


def is_english(text: str, words: Sequence[str]) -> bool:
    """Returns whether a text is in English; `words` are its words in lower case."""
    if sum(word in _ENGLISH for word in words) >= _ENOUGH * len(words):
        return True
    letters = [sign for sign in text.lower() if sign.isalpha()]
    foreign = sum(not "a" <= sign <= "z" for sign in letters)
    others = sum(word in _OTHERS for word in words)
    return foreign < _FOREIGN_LETTERS * max(1, len(letters)) and others < _ENOUGH * len(words)
