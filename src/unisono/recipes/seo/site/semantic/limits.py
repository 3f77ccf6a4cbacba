"""The similarities above which two texts count as the same, by kind of vectors; measured by benchmarks/seo_site.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

_HIGH = 0.5  # a higher median cosine means that all pairs look similar, as with encoders without contrastive training


@dataclass(frozen=True)
class Limits:
    """Minimum cosines or, where stated, minimum fractions."""

    candidate: float
    """Cosine of two pages whose sentences are compared."""
    same_sentence: float
    shared: float
    """Fraction of a duplicate's text that has a counterpart; sentences near the limit count in part."""
    answer: float
    """Mean of two cosines: of a query with the title and with the text of a page that answers it."""
    as_good: float
    """A page competes for a query if its score is at least this fraction of the best page's score."""
    titled: float
    """Cosine of a query with the title of a page that competes."""
    related: float
    """Cosine of the source and the target of a suggested link."""
    moved: float
    """Mean of the similarity of an old page to its new page and the fraction of its text with a counterpart there."""
    by_text: float = 1.0
    by_title: float = 1.0
    by_words: float = 1.0

    def shifted(self, usual: float) -> Limits:
        """Returns higher limits if an encoder's median cosine of two pages, `usual`, is high; otherwise the same."""
        if usual <= _HIGH:
            return self
        names = ("candidate", "same_sentence", "answer", "titled", "related")
        factor = (1 - usual) / (1 - _HIGH)
        return replace(self, **{name: 1 - (1 - getattr(self, name)) * factor for name in names})


OF_WORDS = Limits(0.65, 0.5, 0.6, 0.4, 0.93, 0.5, 0.02, 0.4, by_text=0.0)
OF_MEANING = Limits(0.5, 0.6, 0.66, 0.7, 0.93, 0.8, 0.25, 0.645)
