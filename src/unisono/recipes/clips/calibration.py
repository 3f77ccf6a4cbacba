"""Decides which moments score too low to cut.

The limit depends on the score of the video's best moment, and on the scores that the run gave to held-out videos.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import UserError
from unisono.formatting import format_count
from unisono.observe.folder import METRICS
from unisono.observe.json_lines import JsonLines
from unisono.recipes.clips.cutting.moments import Moment
from unisono.recipes.clips.remarks import format_score

HIGHLIGHTS, OTHERS = "score_of_highlights", "score_of_others"
"""Names of two evaluation metrics: the mean scores of held-out highlights and of the other held-out clips."""

_OF_BEST = 0.1
_OF_GAP = 0.25  # fraction of the gap between the means; below 0.5, so a moment that is half a highlight is still cut


@dataclass(frozen=True)
class Calibration:
    """The mean scores that a run gave to held-out clips."""

    highlights: float
    others: float

    @property
    def floor(self) -> float:
        """Lowest score to cut: a quarter of the way from the others' mean to the highlights'; 0 if that is lower."""
        gap = self.highlights - self.others
        return self.others + _OF_GAP * gap if gap > 0 else 0.0


def calibration_of(run: Path, step: int | None = None) -> Calibration | None:
    """Reads a run's calibration from its last evaluation up to `step`, if given; None without held-out videos."""
    calibration = None
    with suppress(UserError):  # an unreadable file counts as empty
        for record in JsonLines(run / METRICS):
            means = [record.get(f"eval/{name}") for name in (HIGHLIGHTS, OTHERS)]
            at = record.get("step")
            if all(type(mean) is float for mean in means) and (step is None or (type(at) is int and at <= step)):
                calibration = Calibration(*means)  # type: ignore[arg-type]
    return calibration


def without_low(moments: Sequence[Moment], calibration: Calibration | None) -> tuple[list[Moment], str]:
    """Drops moments that score below a tenth of the best score or below the run's floor; also returns a remark.

    `moments` are sorted, best first. The best moment is never dropped, because all scores may be low if the video is
    unlike the training videos.
    """
    if not moments:
        return [], ""
    best = moments[0].score
    relative, calibrated = _OF_BEST * best, calibration.floor if calibration else 0.0
    floor = max(relative, calibrated)
    remaining = [moment for moment in moments if moment.score >= floor] or [moments[0]]
    skipped = moments[len(remaining) :]
    reason = f"a tenth of the best score, {format_score(best)}"
    if calibration and calibrated > relative:
        reason = (
            f"on the run's held-out videos, highlights score {format_score(calibration.highlights)} on average and "
            f"other clips {format_score(calibration.others)}"
        )
    remarks = []
    if best < floor:
        scores = f"{format_score(best)}, below {format_score(floor)}"
        remarks.append(f"even the best moment scores {scores} ({reason}); it is cut anyway")
    if skipped:
        remarks.append(
            f"skipped {format_count(len(skipped), 'moment')} scoring {format_score(skipped[0].score)} or less, below "
            f"{format_score(floor)} ({reason}); --lowest_score 0 cuts them too"
        )
    return remaining, "; ".join(remarks)
