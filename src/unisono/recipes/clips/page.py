"""One page of a video: its curve of scores over time, what it shows, and the clips to play.

A single HTML file beside the clips. It asks nothing of the network: pictures are in it, and the only other files it
names are the clips and the video, by relative links. Whatever comes from outside (names above all) is only ever text.
"""

from __future__ import annotations

import base64
import io
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
from unisono.recipes.common.own_page import allowed, relative_link

_HERE = Path(__file__).parent
_WIDTH, _CURVE_TOP, _CURVE, _AXIS = 1120, 34, 130, 22
_NUM_THUMBNAILS = 12
_MOST_POINTS = 1000
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 36000)


def write_page(
    to: Path,
    footage: Footage,
    scores: ArrayLike,
    clip_seconds: float,
    clips: Sequence[tuple[Moment, Cut]],
    *,
    judged_by: str = "",
) -> Path:
    """Writes the page of a video and its clips, best first, to a new file; `judged_by` tells whose scores they are."""
    text = page(footage, np.asarray(scores, np.float64), clip_seconds, clips, to.parent, judged_by)
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
) -> str:
    """The page as HTML, with links relative to the folder it will be in."""
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    source = relative_link(footage.path, folder)
    name = escape(_printable(footage.path.name))
    facts = [clock(footage.duration), f"{footage.width}×{footage.height}", f"{len(clips)} clips"]
    facts += [] if footage.has_sound else ["no sound"]
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
<p class="facts">{escape(_printable(" · ".join(facts)))}</p></header>
<h2>Timeline</h2>
<section class="card"><video id="whole" controls preload="metadata"{_poster(footage, footage.duration / 2, 640)} \
src="{source}" aria-label="The whole video"></video>
{_timeline(footage, scores, clip_seconds, [moment for moment, _ in clips], source)}
<p class="note">The line is the score of each {clip_seconds:g} seconds; the numbered stretches are the clips below.\
<span id="how" hidden> Click anywhere to play from there.</span></p></section>
<h2>Clips</h2>
{f'<ol class="clips">{cards}</ol>' if clips else '<p class="note">No clip was found.</p>'}
<footer>Made by unisono {escape(__version__)}.</footer>
</main><script>{script}</script></body></html>
"""


def clock(seconds: float) -> str:
    """0:07, 12:34, 1:02:03."""
    whole = int(seconds + 0.5)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _card(number: int, moment: Moment, cut: Cut, footage: Footage, source: str, folder: Path) -> str:
    span = f"{clock(moment.start)} – {clock(moment.end)}"
    # The player shows what the file holds: a copy begins at a key frame, before the moment.
    early = moment.start - cut.start
    note = f'<p class="note">The file begins {early:.1f} s earlier, at a key frame.</p>' if early > 0.05 else ""
    file, called = relative_link(cut.path, folder), escape(_printable(cut.path.name))
    return f"""<li class="card" id="clip-{number}">
<div class="top"><span class="number">{number}</span><h3>{span}</h3>\
<span class="score">{moment.seconds:.1f} s · score {moment.score:.2f}</span></div>
<video controls preload="metadata"{_poster(footage, (moment.start + moment.end) / 2, 360)} src="{file}" \
aria-label="Clip {number}, {span}"></video>{note}
<p class="links"><a href="{_at(source, moment)}" {_data(moment)}>Play in the whole video</a>\
<a href="{file}" download>{called}</a></p></li>"""


def _poster(footage: Footage, time: float, side: int) -> str:
    """What a player shows before it plays, as an attribute; the longer side has `side` pixels."""
    shape = footage.height / max(1.0, footage.width * footage.pixel_aspect)
    width, height = (side, side * shape) if shape <= 1 else (side / shape, side)
    picture = _jpeg(footage.picture_at(time, (max(2, round(width)), max(2, round(height)))))
    return f' poster="{picture}"' if picture else ""


def _timeline(
    footage: Footage, scores: NDArray[np.float64], clip_seconds: float, moments: Sequence[Moment], source: str
) -> str:
    duration = max(footage.duration, 1e-3)
    bottom = _CURVE_TOP + _CURVE
    pictures, strip_height = _strip(footage, bottom + 6)
    height = bottom + 6 + strip_height + _AXIS
    low, high = _range(scores)
    lines, numbers = _grid(low, high, bottom)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" data-duration="{duration:.3f}" role="group" '
        f'aria-label="{escape(_described(scores, moments))}">',
        *lines,
        *(_band(number, moment, duration, bottom, source) for number, moment in enumerate(moments, 1)),
        *_curve(scores, clip_seconds, duration, low, high, bottom),
        *numbers,
        *pictures,
        *_ticks(duration, height),
        f'<line class="head" y1="{_CURVE_TOP - 6}" y2="{height - _AXIS}" visibility="hidden"/></svg>',
    ]
    return "\n".join(parts)


def _band(number: int, moment: Moment, duration: float, bottom: int, source: str) -> str:
    left, right = (_WIDTH * min(1.0, time / duration) for time in (moment.start, moment.end))
    middle = min(max((left + right) / 2, 12), _WIDTH - 12)
    said = f"Clip {number}: {clock(moment.start)} to {clock(moment.end)}, score {moment.score:.2f}"
    return (
        f'<a class="band" href="{_at(source, moment)}" {_data(moment)} aria-label="{said}"><title>{said}</title>'
        f'<rect x="{left:.1f}" y="{_CURVE_TOP - 6}" width="{max(3.0, right - left):.1f}" '
        f'height="{bottom - _CURVE_TOP + 6}" rx="3"/><circle cx="{middle:.1f}" cy="14" r="11"/>'
        f'<text x="{middle:.1f}" y="14" dy=".36em" text-anchor="middle">{number}</text></a>'
    )


def _grid(low: float, high: float, bottom: int) -> tuple[list[str], list[str]]:
    """The lines, and the numbers on them, which stand above everything else."""
    lines, numbers = [], []
    for value in (low, (low + high) / 2, high):
        at = bottom - _CURVE * (value - low) / (high - low)
        lines.append(f'<line class="grid" x1="0" x2="{_WIDTH}" y1="{at:.1f}" y2="{at:.1f}"/>')
        numbers.append(f'<text class="tick" x="3" y="{at - 3:.1f}">{value:.2f}</text>')
    return lines, numbers


def _curve(
    scores: NDArray[np.float64], clip_seconds: float, duration: float, low: float, high: float, bottom: int
) -> list[str]:
    """The line and the area under it, with gaps where there is no score; of very many clips, the best in each place."""
    every = -(-len(scores) // _MOST_POINTS) or 1
    runs: list[list[tuple[float, float]]] = [[]]
    for first in range(0, len(scores), every):
        group = scores[first : first + every]
        known = group[np.isfinite(group)]
        if not len(known):
            runs.append([])
            continue
        middle = min((first + len(group) / 2) * clip_seconds, duration)
        y = bottom - _CURVE * (float(known.max()) - low) / (high - low)
        runs[-1].append((_WIDTH * middle / duration, y))
    parts = []
    for run in filter(None, runs):
        # Up to the run's own ends: the curve of a short video would otherwise begin in its middle.
        half = _WIDTH * every * clip_seconds / duration / 2
        points = [(max(0.0, run[0][0] - half), run[0][1]), *run, (min(_WIDTH, run[-1][0] + half), run[-1][1])]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path class="area" d="M{points[0][0]:.1f} {bottom}L{line}L{points[-1][0]:.1f} {bottom}z"/>')
        parts.append(f'<path class="curve" d="M{line}"/>')
    return parts


def _strip(footage: Footage, top: int) -> tuple[list[str], int]:
    """Small pictures along the timeline, and how high they are."""
    each = _WIDTH / _NUM_THUMBNAILS
    shape = footage.height / max(1.0, footage.width * footage.pixel_aspect)
    height = round(min(each * shape, 90))
    width = min(each - 2, height / shape)
    parts = []
    for number in range(_NUM_THUMBNAILS):
        time = footage.duration * (number + 0.5) / _NUM_THUMBNAILS
        picture = _jpeg(footage.picture_at(time, (max(2, round(width * 2)), max(2, height * 2)), roughly=True))
        if picture:
            left = each * (number + 0.5) - width / 2
            parts.append(f'<image x="{left:.1f}" y="{top}" width="{width:.1f}" height="{height}" href="{picture}"/>')
    return parts, height if parts else 0


def _ticks(duration: float, height: int) -> list[str]:
    step = next((step for step in _STEPS if duration / step <= 10), _STEPS[-1])
    parts = []
    for number in range(int(duration / step) + 1):
        x = _WIDTH * number * step / duration
        anchor = "start" if x < 20 else "end" if x > _WIDTH - 30 else "middle"
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{height - _AXIS}" y2="{height - _AXIS + 5}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 4}" text-anchor="{anchor}">{clock(number * step)}</text>')
    return parts


def _described(scores: NDArray[np.float64], moments: Sequence[Moment]) -> str:
    known = scores[np.isfinite(scores)]
    spread = f", from {known.min():.2f} to {known.max():.2f}" if len(known) else ""
    return f"The score over time{spread}, with {len(moments)} clips marked."


def _range(scores: NDArray[np.float64]) -> tuple[float, float]:
    known = scores[np.isfinite(scores)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    return (low, high) if high - low > 1e-3 else (low - 0.5, high + 0.5)


def _data(moment: Moment) -> str:
    return f'data-start="{moment.start:.3f}" data-end="{moment.end:.3f}"'


def _at(source: str, moment: Moment) -> str:
    return f"{source}#t={moment.start:.3f},{moment.end:.3f}"


def _printable(text: str) -> str:
    return "".join(sign if sign.isprintable() else "�" for sign in text)


def _jpeg(picture: NDArray[np.uint8] | None) -> str:
    if picture is None:
        return ""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
