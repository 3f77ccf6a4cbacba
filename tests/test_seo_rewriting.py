"""Finding sentences that say the same, in texts of many sentences that nearly do."""

from __future__ import annotations

import pytest

from unisono.recipes.seo.front import rewriting


@pytest.mark.parametrize(
    "sentence",
    [
        "We sell the kettle with the number {n} in our shop.",
        "In our small shop in the old town we sell the article with the number {n} every day of the week but Sunday.",
        "Our shop in {word} sells kettles and pots on all days.",
    ],
)
def test_sentences_that_differ_in_one_word_are_not_compared_pair_by_pair(
    monkeypatch: pytest.MonkeyPatch, sentence: str
) -> None:
    compared = []
    alike = rewriting._alike
    monkeypatch.setattr(rewriting, "_alike", lambda *words: compared.append(1) or alike(*words))
    words = [f"{first}{second}ton" for first in "bcdfghklmnprst" for second in "aeioubcdfghklmnprst"]
    text = " ".join(sentence.format(n=number, word=word) for number, word in enumerate(words))
    assert not list(rewriting.proposals(text, []))
    assert len(compared) < len(words), "35,000 pairs"
