"""One page of a video: its curve of scores over time, what it shows, and the clips to play.

A single HTML file beside the clips. It asks nothing of the network: pictures are in it, and the only other files it
names are the clips and the video, by relative links. Whatever comes from outside (names above all) is only ever text.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unisono import __version__
from unisono.errors import UserError
from unisono.recipes.clips.cutting import Cut
from unisono.recipes.clips.footage import Footage
from unisono.recipes.clips.moments import Moment
from unisono.recipes.clips.remarks import UNSEEN, counted, score
from unisono.recipes.clips.timeline import at, clock, data, jpeg, timeline
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
    """Writes the page of a video and its clips, best first, to a new file.

    `judged_by` tells whose scores they are; `remarks` are what else is to be known about the video.
    """
    text = page(footage, np.asarray(scores, np.float64), clip_seconds, clips, to.parent, judged_by, remarks)
    try:
        with to.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{to} is there already; nothing is overwritten: choose another --output_dir") from None
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
    """The page as HTML, with links relative to the folder it will be in."""
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    source = relative_link(footage.path, folder)
    name = escape(_printable(footage.path.name))
    facts = [clock(footage.duration), f"{footage.width}×{footage.height}", counted(len(clips), "clip")]
    facts += [] if footage.has_sound else ["no sound"]
    said = "".join(f'<p class="remark">{escape(_printable(each[:1].upper() + each[1:]))}.</p>' for each in remarks)
    facts += [f"judged by {judged_by}"] if judged_by else []
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
<p class="facts">{escape(_printable(" · ".join(facts)))}</p>{said}</header>
<h2>Timeline</h2>
<section class="card"><video id="whole" controls preload="metadata"{_poster(footage, footage.duration / 2, 640)} \
src="{source}" aria-label="The whole video"></video>
{timeline(footage, scores, clip_seconds, [moment for moment, _ in clips], source)}
<p class="note">The line is the score (0 to 1) of each {clip_seconds:g} seconds; the numbered stretches are the \
clips below.\
<span id="how" hidden> Click anywhere to play from there.</span></p></section>
<h2>Clips</h2>
{f'<ol class="clips">{cards}</ol>' if clips else '<p class="note">No clip was found.</p>'}
<footer>Made by unisono {escape(__version__)}.</footer>
</main><script>{script}</script></body></html>
"""


def _card(number: int, moment: Moment, cut: Cut, footage: Footage, source: str, folder: Path) -> str:
    span = f"{clock(moment.start)} – {clock(moment.end)}"
    # The player shows what the file holds: a copy begins at a key frame, before the moment.
    early = moment.start - cut.start
    note = (
        f'<p class="note">The file has {cut.end - cut.start:.1f} s: it begins {early:.1f} s before the clip, '
        "at a key frame.</p>"
        if early > UNSEEN
        else ""
    )
    file, called = relative_link(cut.path, folder), escape(_printable(cut.path.name))
    return f"""<li class="card" id="clip-{number}">
<div class="top"><span class="number">{number}</span><h3>{span}</h3>\
<span class="score">{moment.seconds:.1f} s · score {score(moment.score)}</span></div>
<video controls preload="metadata"{_poster(footage, (moment.start + moment.end) / 2, 360)} src="{file}" \
aria-label="Clip {number}, {span}"></video>{note}
<p class="links"><a href="{at(source, moment)}" {data(moment)}>Play in the whole video</a>\
<a href="{file}" download>{called}</a></p></li>"""


def _poster(footage: Footage, time: float, side: int) -> str:
    """What a player shows before it plays, as an attribute; the longer side has `side` pixels."""
    shape = footage.height / max(1.0, footage.width * footage.pixel_aspect)
    width, height = (side, side * shape) if shape <= 1 else (side / shape, side)
    picture = jpeg(footage.picture_at(time, (max(2, round(width)), max(2, round(height)))))
    return f' poster="{picture}"' if picture else ""


def _printable(text: str) -> str:
    return "".join(sign if sign.isprintable() else "�" for sign in text)
