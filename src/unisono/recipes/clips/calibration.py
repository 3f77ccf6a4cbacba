"""Which scores count as low: by the best moment of a video, and by what the run gave to its held-out videos."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import UserError
from unisono.formatting import format_count
from unisono.observe.folder import METRICS
from unisono.observe.report.lines import JsonLines
from unisono.recipes.clips.cutting.moments import Moment
from unisono.recipes.clips.remarks import score

HIGHLIGHTS, OTHERS = "score_of_highlights", "score_of_others"
"""Evaluation metrics: the mean score of held-out clips that are highlights, and of those that are not."""

_OF_BEST = 0.1
_BETWEEN = 0.25  # a moment of two clips of which one is a highlight lies half-way, and should be cut


@dataclass(frozen=True)
class Calibration:
    """The mean scores that a run gave to held-out clips."""

    highlights: float
    others: float

    @property
    def floor(self) -> float:
        """A quarter of the way from other clips to highlights; 0 where the run does not tell them apart."""
        gap = self.highlights - self.others
        return self.others + _BETWEEN * gap if gap > 0 else 0.0


def calibration_of(run: Path, step: int | None = None) -> Calibration | None:
    """The last one that the run has measured, at `step` or before it; None for a run without held-out videos."""
    calibration = None
    with suppress(UserError):  # unreadable: as if nothing was measured
        for record in JsonLines(run / METRICS):
            values = [record.get(f"eval/{name}") for name in (HIGHLIGHTS, OTHERS)]
            at = record.get("step")
            if all(type(value) is float for value in values) and (step is None or (type(at) is int and at <= step)):
                calibration = Calibration(*values)  # type: ignore[arg-type]
    return calibration


def without_low(moments: Sequence[Moment], calibration: Calibration | None) -> tuple[list[Moment], str]:
    """The moments, best first, without those that score low beside the best or below the run's floor; and why.

    The best one stays in any case: of a video unlike those of the run, all scores may be low.
    """
    if not moments:
        return [], ""
    best = moments[0].score
    relative, calibrated = _OF_BEST * best, calibration.floor if calibration else 0.0
    floor = max(relative, calibrated)
    kept = [moment for moment in moments if moment.score >= floor] or [moments[0]]
    left_out = moments[len(kept) :]
    why = f"a tenth of the best score, {score(best)}"
    if calibration and calibrated > relative:
        why = (
            f"on the run's held-out videos, highlights score {score(calibration.highlights)} on average and other "
            f"clips {score(calibration.others)}"
        )
    remarks = []
    if best < floor:
        remarks.append(f"even the best moment scores {score(best)}, below {score(floor)} ({why}); it is cut anyway")
    if left_out:
        remarks.append(
            f"skipped {format_count(len(left_out), 'moment')} scoring {score(left_out[0].score)} or less, below "
            f"{score(floor)} ({why}); --lowest_score 0 cuts them too"
        )
    return kept, "; ".join(remarks)
