"""Writes a video's page.html: the scores over time, thumbnails, and players for the clips.

The page is a single HTML file next to the clips, built with unisono's page kit. It makes no network request: images are
embedded, and relative links refer only to the clips and the video.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono import __version__
from unisono.errors import UserError
from unisono.formatting import format_clock, format_count
from unisono.pages.kit import relative_link, render
from unisono.recipes.clips.cutting.cut import Cut
from unisono.recipes.clips.cutting.moments import Moment
from unisono.recipes.clips.page.timeline import timeline
from unisono.recipes.clips.remarks import NEGLIGIBLE_S, format_score
from unisono.recipes.clips.scoring import Scored
from unisono.recipes.clips.untrained.combine import shares_of
from unisono.recipes.clips.untrained.parts import LABELS
from unisono.recipes.clips.video.footage import Footage
from unisono.recipes.clips.words.said import Said

_TEMPLATE = Path(__file__).with_name("page.html")
_NUM_THUMBNAILS = 12
_SMALLEST_SHARE = 0.05  # minimum fraction of a clip's score that a component must contribute to be mentioned
_WIDE_SCREEN = 1120  # width of the timeline on a large screen, in pixels


def write_page(
    to: Path,
    footage: Footage,
    scored: Scored,
    clips: Sequence[tuple[Moment, Cut]],
    scored_by: str = "",
    remarks: Sequence[str] = (),
    said: Sequence[Said | None] = (),
) -> Path:
    """Writes the page of a video and its clips (best first) to a new file.

    `scored_by` names the model that computed the scores; `remarks` are warnings about the video, one paragraph each.
    """
    facts = [format_clock(footage.duration), f"{footage.width}×{footage.height}", format_count(len(clips), "clip")]
    facts += [] if footage.has_sound else ["no sound"]
    facts += [f"scored by {scored_by}"] if scored_by else []
    moments = [moment for moment, _ in clips]
    text = render(
        _TEMPLATE,
        kind="clips",
        title=f"{footage.path.name}: clips",
        media="'self' file: data:",
        version=__version__,
        name=footage.path.name,
        facts=facts,
        remarks=[f"{remark[:1].upper()}{remark[1:]}." for remark in remarks],
        source=relative_link(footage.path, to.parent),
        whole_poster=_poster(footage, footage.duration / 2, 640),
        timeline=timeline(
            footage, np.asarray(scored.scores, np.float64), scored.clip_seconds, moments, _thumbnails(footage)
        ),
        clip_seconds=scored.clip_seconds,
        cards=[
            _card(moment, cut, footage, to.parent, _reasons(moment, scored), words)
            for (moment, cut), words in zip_longest(clips, said)
        ],
    )
    try:
        with to.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{to} already exists and is not overwritten; choose another --output_dir") from None
    except OSError as error:
        raise UserError(f"{to} cannot be written ({error.strerror})") from None
    return to


def _reasons(moment: Moment, scored: Scored) -> str:
    """Describes what the built-in scorer detected in a moment; empty for a trained run."""
    shares = [(name, share) for name, share in shares_of(moment, scored).items() if share >= _SMALLEST_SHARE]
    return ", ".join(f"{LABELS[name]} {100 * share:.0f} %" for name, share in shares)


def _card(moment: Moment, cut: Cut, footage: Footage, folder: Path, reasons: str, said: Said | None) -> dict[str, Any]:
    early = moment.start - cut.start
    return {
        "moment": moment,
        "span": f"{format_clock(moment.start)} – {format_clock(moment.end)}",
        "score": format_score(moment.score),
        "reasons": reasons,
        "title": said.title if said else "",
        "text": said.text if said else "",
        "track": said.track if said else "",
        "caption_files": [(relative_link(cut.path.with_name(name), folder), name) for name in said.files]
        if said
        else [],
        "poster": _poster(footage, (moment.start + moment.end) / 2, 360),
        "file": relative_link(cut.path, folder),
        "file_name": cut.path.name,
        "file_seconds": cut.end - cut.start,
        # A stream copy starts at a key frame before the moment, so the link makes the player seek to the moment.
        "early": early if early > NEGLIGIBLE_S else 0.0,
    }


def _poster(footage: Footage, time: float, longer_side: int) -> str:
    """Returns the image that a player shows before playback."""
    shape = footage.height / max(1.0, footage.width * footage.pixel_aspect)
    width, height = (longer_side, longer_side * shape) if shape <= 1 else (longer_side / shape, longer_side)
    return _jpeg(footage.picture_at(time, (max(2, round(width)), max(2, round(height)))))


def _thumbnails(footage: Footage) -> tuple[list[str], int]:
    """Returns images of the video at evenly spaced times, and the height in pixels at which the timeline shows them."""
    slot = _WIDE_SCREEN / _NUM_THUMBNAILS
    shape = footage.height / max(1.0, footage.width * footage.pixel_aspect)
    height = round(min(slot * shape, 90))
    size = (max(2, round(min(slot - 2, height / shape) * 2)), max(2, height * 2))  # sharp on high-density displays too
    times = (footage.duration * (number + 0.5) / _NUM_THUMBNAILS for number in range(_NUM_THUMBNAILS))
    return [_jpeg(footage.picture_at(time, size, roughly=True)) for time in times], height


def _jpeg(picture: NDArray[np.uint8] | None) -> str:
    """Encodes an image as a data URL; empty if there is no image."""
    if picture is None:
        return ""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
