"""Writes clips.json, which contains the scores and clips of a video for other programs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.recipes.clips.remarks import about_scores
from unisono.recipes.clips.untrained.combine import shares_of

if TYPE_CHECKING:
    from unisono.recipes.clips.cutting.cut import Cut
    from unisono.recipes.clips.cutting.moments import Moment
    from unisono.recipes.clips.scoring import Scored
    from unisono.recipes.clips.video.footage import Footage
    from unisono.recipes.clips.words.said import Said


def write_record(
    to: Path,
    footage: Footage,
    scored: Scored,
    clips: Sequence[tuple[Moment, Cut]],
    scored_by: str,
    trained_on: str,
    remarks: Sequence[str],
    said: Sequence[Said | None] = (),
) -> None:
    """Writes clips.json of a video; never overwrites a file."""
    content = {
        "video": footage.path.name,
        "duration": round(footage.duration, 3),
        "judged_by": scored_by,
        "trained_on": trained_on,
        "damage": scored.damage.to_json() if scored.damage else None,
        "remarks": list(remarks),
        "nothing_stands_out": bool(about_scores(scored.scores)),
        "clip_seconds": scored.clip_seconds,
        "scores": [round(float(score), 5) if math.isfinite(score) else None for score in scored.scores],
        "parts": {name: [round(float(value), 5) for value in values] for name, values in scored.parts.items()},
        "clips": [
            {
                "start": round(moment.start, 3),
                "end": round(moment.end, 3),
                "score": round(moment.score, 5),
                "shares": {name: round(share, 3) for name, share in shares_of(moment, scored).items()},
                "file": cut.path.name,
                "file_start": round(cut.start, 3),
                "file_end": round(cut.end, 3),
                **({"title": words.title, "text": words.text, "captions": words.files} if words else {}),
            }
            for (moment, cut), words in zip_longest(clips, said)
        ],
    }
    with to.open("x", encoding="utf-8", errors="replace") as file:
        json.dump(content, file, indent=2, ensure_ascii=False, allow_nan=False)
