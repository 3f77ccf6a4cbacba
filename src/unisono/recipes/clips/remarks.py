"""Remarks about a video and its clips: one line each, for the terminal, clips.json and the page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from unisono.formatting import format_count
from unisono.recipes.clips.cutting.cut import Cut
from unisono.recipes.clips.cutting.moments import Moment

LEAST_SPREAD = 0.05
"""Minimum difference between a video's best and worst score for any part of the video to stand out."""
NEGLIGIBLE_S = 0.05
"""Tolerance in seconds (about one frame) for files that start early and for videos that are too short."""


def about_scores(scores: ArrayLike) -> str:
    """Returns a remark if no part of the video stands out; empty otherwise, and for a video with a single score."""
    finite = np.asarray(scores, np.float64)
    finite = finite[np.isfinite(finite)]
    if len(finite) < 2 or finite.max() - finite.min() >= LEAST_SPREAD:
        return ""
    spread = f"{format_score(finite.min())} and {format_score(finite.max())}"
    return f"nothing stands out: all scores lie between {spread}, too close to tell one part from another"


def about_length(duration: float, shortest: float, moments: Sequence[Moment]) -> str:
    """Returns a remark if the video is shorter than the shortest allowed clip, so the whole video is one clip."""
    if not moments or duration >= shortest - NEGLIGIBLE_S:
        return ""
    return f"the video is {duration:.1f} s long, shorter than --shortest {shortest:g}, so the whole video is one clip"


def about_lowest(moments: Sequence[Moment], lowest: float) -> str:
    """Returns a remark if some moments are skipped because they score below --lowest_score."""
    low = [moment.score for moment in moments if moment.score < lowest]
    if not low:
        return ""
    return (
        f"skipped {format_count(len(low), 'moment')} below --lowest_score {lowest:g} (the best of them scores "
        f"{format_score(max(low))})"
    )


def summary(clips: Sequence[tuple[Moment, Cut]], duration: float, seconds: float) -> str:
    """Returns the line to print when a video is done: its clips, and how long scoring took."""
    total = sum(moment.seconds for moment, _ in clips)
    text = f"{format_count(len(clips), 'clip')}, {total:.0f} of {duration:.0f} s, scored in {seconds:.1f} s"
    early = [moment.start - cut.start for moment, cut in clips if moment.start - cut.start > NEGLIGIBLE_S]
    if not early:
        return text
    files = "1 file starts" if len(early) == 1 else f"{len(early)} files start up to"
    return (
        f"{text}; {files} {max(early):.1f} s before the moment, because a copy can only start at a key frame; "
        "--exact re-encodes them to start at the exact frame"
    )


def format_score(value: float) -> str:
    """Formats a score with two decimals, or with one significant digit if it is small: 0.50, 0.0006."""
    if 1e-6 <= abs(value) < 0.01:
        return f"{value:.1g}"
    return f"{value:.2f}" if abs(value) >= 0.01 else "0.00"
