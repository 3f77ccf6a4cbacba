"""What is worth a word about a video and its clips: one line each, for the terminal, clips.json and the page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from unisono.formatting import format_count
from unisono.recipes.clips.cutting.cut import Cut
from unisono.recipes.clips.cutting.moments import Moment

LEAST_SPREAD = 0.05
"""How far the best and the worst score of a video, of 0 to 1, must be apart for any part of it to stand out."""
UNSEEN = 0.05
"""Seconds that are not worth a word, about a frame: by which a file begins early, or a video is too short."""


def about_scores(scores: ArrayLike) -> str:
    """That nothing stands out; empty where something does, or where there is only one score."""
    known = np.asarray(scores, np.float64)
    known = known[np.isfinite(known)]
    if len(known) < 2 or known.max() - known.min() >= LEAST_SPREAD:
        return ""
    spread = f"{score(known.min())} and {score(known.max())}"
    return f"nothing stands out: all scores lie between {spread}, too close to tell one part from another"


def about_length(duration: float, shortest: float, moments: Sequence[Moment]) -> str:
    """That a clip is the whole video because that is too short for another one."""
    if not moments or duration >= shortest - UNSEEN:
        return ""
    return f"it has {duration:.1f} s, less than --shortest {shortest:g}: the one clip is the whole video"


def about_lowest(found: Sequence[Moment], lowest: float | None) -> str:
    """That some moments score too low to be cut."""
    low = [moment for moment in found if lowest is not None and moment.score < lowest]
    if not low:
        return ""
    best = max(moment.score for moment in low)
    return (
        f"not cut: {format_count(len(low), 'moment')} below --lowest_score {lowest:g} (the best of them: {score(best)})"
    )


def summary(clips: Sequence[tuple[Moment, Cut]], duration: float, seconds: float) -> str:
    """What was made of a video, and how long the scoring took."""
    total = sum(moment.seconds for moment, _ in clips)
    made = f"{format_count(len(clips), 'clip')}, {total:.0f} s in all, of a video of {duration:.0f} s"
    text = f"{made}, scored in {seconds:.1f} s"
    early = [moment.start - cut.start for moment, cut in clips if moment.start - cut.start > UNSEEN]
    if not early:
        return text
    begin = "1 file begins" if len(early) == 1 else f"{len(early)} files begin up to"
    return (
        f"{text}; {begin} {max(early):.1f} s before the moment, as a copy can only begin at a key frame; "
        "with --exact they begin to the frame"
    )


def score(value: float) -> str:
    """A score as people read it: 0.50, and 0.0006 where two digits would say nothing."""
    return f"{value:.2f}" if abs(value) >= 0.01 or not value else f"{value:.1g}" if abs(value) >= 1e-6 else "0.00"
