"""What can be said of a text: the learned score, the checks, and changes that do not make it worse.

The three are kept apart. A score is there only after training on real labels; checks are plain rules and never called
learned; a change is kept only where the model that judges it does not like the text less.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict
from typing import Any

from unisono.config.values import shown
from unisono.errors import ConfigError
from unisono.recipes.seo.front.learner import Learner
from unisono.recipes.seo.front.rewriting import proposals, titles
from unisono.recipes.seo.site.text_rules import Check, check_text

NO_SCORE = "no score: this engine was not trained yet; train it on texts with real labels, or load_checkpoint"
_WORDS = "classes that are words have no score; see label and probabilities"
_MOST_CHANGES = 50  # of one text
_SAME = 1e-6  # of a score: rounding


class Answer(dict[str, Any]):
    """A dict that may also be awaited, because the known engine's methods were."""

    def __await__(self) -> Generator[None, None, Answer]:
        yield from ()
        return self


class Analysis:
    """Analyses texts with what the learner has learned, and with a model that ranks."""

    def __init__(self, learner: Learner, precision: str) -> None:
        self._learner, self._precision = learner, precision
        self._ranker: Any = None

    def of(self, texts: Sequence[str], keywords: Sequence[str]) -> list[dict[str, Any]]:
        """Score and checks of each text."""
        for place, text in enumerate(texts):
            which = f"text number {place}" if len(texts) > 1 else "the text"
            need_text(text, which, "analyse")
        learned = self._learned(texts)
        return [
            {**said, "checks": [described(check) for check in check_text(text, keywords)], "keywords": list(keywords)}
            for text, said in zip(texts, learned, strict=True)
        ]

    def _learned(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        learner = self._learner
        if learner.labels is None or not learner.learned_epochs:
            return [{"seo_score": None, "label": None, "probabilities": None, "reason": NO_SCORE} for _ in texts]
        found = learner.labels.read(learner.predict(texts, self._precision))
        return [{**said, "reason": _WORDS if said["seo_score"] is None else None} for said in found]

    # --- changes

    def improved(self, content: str, keywords: Sequence[str]) -> Answer:
        """The text with those of the proposed changes that its judge does not like less."""
        judge, judged_by = self._judge(keywords)
        text, changes = content.strip(), []
        score = before = judge(text) if judge else None
        tried: set[str] = set()
        waiting = proposals(text, keywords)
        while len(tried) < _MOST_CHANGES:
            made = next((each for each in waiting if each.text not in tried), None)
            if made is None:
                break
            tried.add(made.text)
            after = judge(made.text) if judge else None
            # Without a judge a change is shown, and the text stays as it is.
            kept = score is not None and after is not None and after >= score - _SAME
            told = {"kind": made.kind, "why": made.why, "before": made.before, "after": made.after}
            changes.append({**told, "score_before": score, "score_after": after, "kept": kept})
            if kept:
                text, score = made.text, after
                waiting = proposals(text, keywords)
        return Answer(
            original_content=content,
            optimized_content=text if text != content.strip() else content,
            original_score=before,
            optimized_score=score,
            improvement=None if before is None or score is None else score - before,
            scored_by=judged_by,
            changes=changes,
            titles=self._titles(content, keywords, judge),
            checks_before=[described(check) for check in check_text(content, keywords)],
            checks_after=[described(check) for check in check_text(text, keywords)],
            keywords=list(keywords),
        )

    def _titles(self, text: str, keywords: Sequence[str], judge: Callable[[str], float] | None) -> list[dict[str, Any]]:
        """Candidates for a title or heading, from the text's own words, the best first."""
        scored = [{"title": title, "score": judge(title) if judge else None} for title in titles(text, keywords)]
        return sorted(scored, key=lambda each: -(each["score"] or 0.0))[:3]  # type: ignore[operator]

    def _judge(self, keywords: Sequence[str]) -> tuple[Callable[[str], float] | None, str]:
        """How good a text is for these keywords, and who says so."""
        learner = self._learner
        if learner.config.rank_model is not None:
            ranker = self._open_ranker()
            return (
                lambda text: float(ranker.scores(list(keywords), [text]).mean()),
                f"rank_model {learner.config.rank_model} ({ranker.told}): how well it answers {', '.join(keywords)}",
            )
        labels = learner.labels
        if labels is None or not learner.learned_epochs:
            return None, NO_SCORE + ", or name a rank_model"
        if labels.num > 2 and any(isinstance(each, str) for each in labels.classes):
            return None, _WORDS
        return (
            lambda text: float(labels.read(learner.predict([text], self._precision))[0]["seo_score"]),
            "the score that this engine has learned",
        )

    def _open_ranker(self) -> Any:
        if self._ranker is None:
            from unisono.recipes.seo.trained import open_ranker

            self._ranker = open_ranker(str(self._learner.config.rank_model))
        return self._ranker


def need_text(text: Any, which: str, what_for: str) -> None:
    """Refuses what is no text, and a text with nothing in it."""
    if not isinstance(text, str):
        raise ConfigError(f"{which}: expected a string, got {shown(text)} of type {type(text).__name__}")
    if not text.strip():
        raise ConfigError(f"{which} is empty; there is nothing to {what_for}")


def described(check: Check) -> dict[str, Any]:
    """A check in types that JSON knows."""
    return asdict(check)
