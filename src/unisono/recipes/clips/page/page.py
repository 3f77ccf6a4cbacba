"""page.html of a video: the scores over time, thumbnails, and the clips in players.

A single HTML file next to the clips. It makes no network request: images are embedded, and the only other files it
refers to are the clips and the video, by relative links. Text from outside (file names above all) is always escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unisono import __version__
from unisono.errors import UserError
from unisono.formatting import format_clock, format_count
from unisono.recipes.clips.cutting.cut import Cut
from unisono.recipes.clips.cutting.moments import Moment
from unisono.recipes.clips.page.timeline import at, data, jpeg, timeline
from unisono.recipes.clips.remarks import UNSEEN, score
from unisono.recipes.clips.video.footage import Footage
from unisono.recipes.common.own_page import allowed, relative_link

_HERE = Path(__file__).parent


def write_page(
    to: Path,
    footage: Footage,
    scores: ArrayLike,
    clip_seconds: float,
    clips: Sequence[tuple[Moment, Cut]],
    judged_by: str = "",
    remarks: Sequence[str] = (),
) -> Path:
    """Writes the page of a video and its clips (best first) to a new file.

    `judged_by` names the model that gave the scores; `remarks` are warnings about the video, one paragraph each.
    """
    text = page(footage, np.asarray(scores, np.float64), clip_seconds, clips, to.parent, judged_by, remarks)
    try:
        with to.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{to} already exists and is not overwritten; choose another --output_dir") from None
    except OSError as error:
        raise UserError(f"{to} cannot be written ({error.strerror})") from None
    return to


def page(
    footage: Footage,
    scores: NDArray[np.float64],
    clip_seconds: float,
    clips: Sequence[tuple[Moment, Cut]],
    folder: Path,
    judged_by: str = "",
    remarks: Sequence[str] = (),
) -> str:
    """Returns the page as HTML, with links relative to the folder that it will be written to."""
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    source = relative_link(footage.path, folder)
    name = escape(_printable(footage.path.name))
    facts = [format_clock(footage.duration), f"{footage.width}×{footage.height}", format_count(len(clips), "clip")]
    facts += [] if footage.has_sound else ["no sound"]
    warnings = "".join(
        f'<p class="remark">{escape(_printable(remark[:1].upper() + remark[1:]))}.</p>' for remark in remarks
    )
    facts += [f"scored by {judged_by}"] if judged_by else []
    cards = "\n".join(
        _card(number, moment, cut, footage, source, folder) for number, (moment, cut) in enumerate(clips, 1)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="unisono clips">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; media-src 'self' file:; \
style-src '{allowed(style)}'; script-src '{allowed(script)}'">
<title>{name}: clips</title><style>{style}</style></head><body><main>
<header><p class="brand">unisono <span>clips</span></p><h1>{name}</h1>
<p class="facts">{escape(_printable(" · ".join(facts)))}</p>{warnings}</header>
<h2>Timeline</h2>
<section class="card"><video id="whole" controls preload="metadata"{_poster(footage, footage.duration / 2, 640)} \
src="{source}" aria-label="The whole video"></video>
{timeline(footage, scores, clip_seconds, [moment for moment, _ in clips], source)}
<p class="note">The line is the score (0 to 1) of each {clip_seconds:g} seconds; the numbered bands are the clips \
below.\
<span id="how" hidden> Click anywhere to play from there.</span></p></section>
<h2>Clips</h2>
{f'<ol class="clips">{cards}</ol>' if clips else '<p class="note">There are no clips.</p>'}
<footer>Made by unisono {escape(__version__)}.</footer>
</main><script>{script}</script></body></html>
"""


def _card(number: int, moment: Moment, cut: Cut, footage: Footage, source: str, folder: Path) -> str:
    span = f"{format_clock(moment.start)} – {format_clock(moment.end)}"
    # A stream copy starts at a key frame before the moment, so the link makes the player seek to the moment.
    early = moment.start - cut.start
    note = (
        f'<p class="note">The file is {cut.end - cut.start:.1f} s long: it starts at a key frame, {early:.1f} s '
        "before the clip; the player skips these seconds.</p>"
        if early > UNSEEN
        else ""
    )
    file, file_name = relative_link(cut.path, folder), escape(_printable(cut.path.name))
    part = f"#t={early:.3f}" if early > UNSEEN else ""
    return f"""<li class="card" id="clip-{number}">
<div class="top"><span class="number">{number}</span><h3>{span}</h3>\
<span class="score">{moment.seconds:.1f} s · score {score(moment.score)}</span></div>
<video controls preload="metadata"{_poster(footage, (moment.start + moment.end) / 2, 360)} src="{file}{part}" \
aria-label="Clip {number}, {span}"></video>{note}
<p class="links"><a href="{at(source, moment)}" {data(moment)}>Play in the whole video</a>\
<a href="{file}" download>{file_name}</a></p></li>"""


def _poster(footage: Footage, time: float, side: int) -> str:
    """The `poster` attribute of a player, its image before playback; the longer side has `side` pixels."""
    shape = footage.height / max(1.0, footage.width * footage.pixel_aspect)
    width, height = (side, side * shape) if shape <= 1 else (side / shape, side)
    picture = jpeg(footage.picture_at(time, (max(2, round(width)), max(2, round(height)))))
    return f' poster="{picture}"' if picture else ""


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "�" for character in text)
