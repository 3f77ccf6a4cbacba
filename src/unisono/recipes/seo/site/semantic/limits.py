"""The similarities from which two texts count as the same, by kind of vectors; measured by benchmarks/seo_site.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

_HIGH = 0.5  # above this, the cosines of all pairs are high, as those of encoders without contrastive training


@dataclass(frozen=True)
class Limits:
    """Least cosines."""

    candidate: float
    """Pages whose sentences are compared."""
    same_sentence: float
    shared: float
    """Fraction of the sentences of a duplicate that have a counterpart; counterparts near the limit count in part."""
    answer: float
    """Mean of the cosines of a query with the title and the text of a page that answers it."""
    as_good: float
    """Fraction of the best page's score from which another page competes."""
    titled: float
    """Query and title of a page that competes."""
    related: float
    """Source and target of a link."""
    moved: float
    """An old page and the page that replaced it: the mean of their similarity and of the sentences' fraction."""
    by_text: float = 1.0
    by_title: float = 1.0
    by_words: float = 1.0

    def shifted(self, usual: float) -> Limits:
        """The limits for an encoder with this median cosine of two pages; unchanged if it is not unusually high."""
        if usual <= _HIGH:
            return self
        names = ("candidate", "same_sentence", "answer", "titled", "related")
        factor = (1 - usual) / (1 - _HIGH)
        return replace(self, **{name: 1 - (1 - getattr(self, name)) * factor for name in names})


OF_WORDS = Limits(0.65, 0.5, 0.6, 0.4, 0.93, 0.5, 0.02, 0.4, by_text=0.0)
OF_MEANING = Limits(0.5, 0.6, 0.66, 0.7, 0.93, 0.8, 0.25, 0.645)
