"""The page: everything about a run in one HTML file that needs no network, no server and no script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from unisono import __version__
from unisono.observe.folder import METRICS
from unisono.observe.report.chart import Chart, draw
from unisono.observe.report.charts import learning_charts, speed_charts
from unisono.observe.report.choices import Choice, choices, shown
from unisono.observe.report.previews import Gallery
from unisono.observe.report.reading import Run
from unisono.observe.report.timeline import Happening, moment
from unisono.observe.report.words import a_count, clipped, compact, duration

SIGNATURE = '<meta name="generator" content="unisono report">'
"""By this a file is known as a report of ours, which may be written anew."""

_HERE = Path(__file__).parent
_MOST_STARTS = 20
_OF_ALL = {"start", "resume", "restart"}  # noted by one rank, but not about it


def page(run: Run, gallery: Gallery, now: datetime | None = None) -> str:
    """The report of a run as HTML."""
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    script = (_HERE / "hover.js").read_text(encoding="utf-8")
    # Only our own script may run, whatever a file of the run smuggles in; and nothing is fetched from anywhere.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; script-src 'sha256-{digest}'"
    )
    recipe = _text(run.record.get("recipe"))
    charts = learning_charts(run.metrics, run.timeline)
    speed = speed_charts(run.metrics, run.timeline)
    sections = [
        _header(run, recipe, now or datetime.now(UTC)),
        _section("Previews", _previews(gallery)) if gallery.shown or gallery.left_out else "",
        _section("Learning", _drawn(charts, 0)) if charts else "",
        _section("Faults survived", _happened(run)),
        _section("Speed and memory", _drawn(speed, len(charts))) if speed else "",
        _section("Starts", _starts(run)),
        _section("Settings", _settings(run)),
        _section("Versions", _versions(run)),
        _footer(run, now or datetime.now(UTC)),
    ]
    body = "\n".join(filter(None, sections))
    return (
        f'<!doctype html>\n{SIGNATURE}\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{recipe} · {escape(clipped(run.folder.resolve().name, 80))}</title>\n<style>{style}</style></head>\n"
        f"<body><main>\n{body}\n</main>\n<script>{script}</script></body></html>\n"
    )


def status_of(run: Run) -> tuple[str, str]:
    """How the run stands, in a word and in a sentence."""
    status = run.timeline.status
    if status == "done":
        return "done", "trained to the end"
    if run.running:
        return "running", "training now"
    if status == "stopped":
        return "stopped", "with a checkpoint; the same command goes on"
    if status == "failed":
        failures = [happening for happening in run.timeline.all() if happening.kind == "failed"]
        return "failed", failures[-1].sentence if failures else ""
    return "unfinished", "it was killed, or it runs on another machine; the same command goes on"


def _header(run: Run, recipe: str, now: datetime) -> str:
    timeline, starts = run.timeline, run.starts
    word, sentence = status_of(run)
    began = moment(run.record.get("created")) or timeline.began
    seconds = timeline.seconds(now if run.running else None)
    strategy = _text(starts[-1].get("strategy")) if starts else ""
    facts = {
        "started": f"{began:%d %B %Y, %H:%M} UTC" if began else "unknown",
        "at work": duration(seconds) + (f" in {a_count(len(starts), 'start')}" if len(starts) > 1 else ""),
        "ranks": _changes(starts, "world") + (f", {strategy}" if strategy else ""),
        "launcher": _changes(starts, "launcher"),
        "seed": _text(run.record.get("seed")),
    }
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    return (
        f'<header><p class="brand">unisono <span>report</span></p><h1>{recipe}</h1>'
        f'<p class="folder">{escape(clipped(str(run.folder), 200))}</p>'
        f'<p class="status {word}"><b>{word}</b> {escape(sentence)}</p>'
        f'<dl class="facts">{listed}</dl>{_tiles(run)}</header>'
    )


def _changes(starts: Sequence[dict[str, Any]], key: str) -> str:
    """What something was at the run's starts: 8 → 4 → 8."""
    values = [_text(start.get(key)) for start in starts]
    changes = [value for before, value in pairwise(["", *values]) if value != before]
    return " → ".join([*changes[:3], "…", *changes[-3:]] if len(changes) > 7 else changes) or "unknown"


def _tiles(run: Run) -> str:
    metrics, timeline = run.metrics, run.timeline
    tiles = []
    epochs = f"{compact(metrics.samples)} samples" + (f", epoch {compact(metrics.epoch, 3)}" if metrics.epoch else "")
    tiles.append(("steps", compact(metrics.step), epochs))
    loss = metrics.series.get("loss")
    if loss is not None and loss.count:
        trend = loss.trend()
        tiles.append(
            ("loss", compact(trend[-1][1], 3), f"from {compact(trend[0][1], 3)}, lowest {compact(loss.lowest, 3)}")
        )
    name = _headline(run)
    if name is not None:
        found = metrics.series[name]
        best = f"lowest {compact(found.lowest)}, highest {compact(found.highest)}"
        tiles.append((name, compact(found.last[1]) if found.last else "", best))
    speed = metrics.series.get("samples_per_s")
    if speed is not None and speed.count:
        tiles.append(("samples/s", compact(speed.mean, 3), f"peak {compact(speed.highest, 3)}"))
    memory = metrics.series.get("mem_gib")
    if memory is not None and memory.count:
        tiles.append(("peak memory", f"{compact(memory.highest, 3)} GiB", "of a rank"))
    again = a_count(timeline.counts["restart"], "restart") if timeline.counts["restart"] else "no restart"
    tiles.append(("faults survived", f"{timeline.survived:,}", again))
    items = ""
    for label, value, more in tiles:
        title = escape(clipped(label, 60)).replace("_", "_<wbr>")
        items += f"<li><span>{title}</span><b>{escape(value)}</b><small>{escape(more)}</small></li>"
    return f'<ul class="tiles">{items}</ul>'


def _headline(run: Run) -> str | None:
    """The evaluation metric that stands at the top: the one that picks the best checkpoint, or the first."""
    evaluated = [name for name, found in run.metrics.series.items() if name.startswith("eval/") and found.count]
    chosen = run.part("config").get("best_metric")
    if chosen in evaluated:
        return str(chosen)
    return next((name for name in evaluated if name != "eval/loss"), evaluated[0] if evaluated else None)


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{content}\n</section>"


def _drawn(charts: Iterable[Chart], first: int) -> str:
    return f'<div class="charts">{"".join(draw(chart, first + index) for index, chart in enumerate(charts))}</div>'


def _happened(run: Run) -> str:
    timeline = run.timeline
    first, last = timeline.happenings()
    said = [timeline.saves()]
    if timeline.counts["injected"]:
        said.append("Faults were rehearsed on purpose (--inject); each really happened in the run's processes.")
    if not timeline.survived:
        said.insert(0, "Nothing went wrong.")
    rows = [_happening(happening, timeline.began) for happening in first]
    if timeline.left_out:
        rows.append(f'<li class="plain"><span></span><span></span><div>… {timeline.left_out:,} more …</div></li>')
    rows += [_happening(happening, timeline.began) for happening in last]
    listed = f'<ol class="timeline card">{"".join(rows)}</ol>' if rows else ""
    return f"<p>{escape(' '.join(said))}</p>{listed}"


def _happening(happening: Happening, began: datetime | None) -> str:
    when = happening.when
    after = f"+{_clock((when - began).total_seconds())}" if when and began else ""
    exact = f' title="{when:%Y-%m-%d %H:%M:%S} UTC"' if when else ""
    step = f"step {compact(happening.step)}" if happening.step is not None else ""
    if happening.count > 1 and happening.last_step is not None and happening.step is not None:
        step = f"steps {compact(happening.step)}–{compact(happening.last_step)}"
    where = f"<em>rank {happening.rank}</em> " if happening.rank is not None and happening.kind not in _OF_ALL else ""
    times = f" <em>{happening.count:,} times</em>" if happening.count > 1 else ""
    return (
        f'<li class="{happening.tone}"><time{exact}>{after}</time><span>{step}</span>'
        f"<div><b>{escape(happening.title)}</b>{times} {where}{escape(happening.sentence)}</div></li>"
    )


def _clock(seconds: float) -> str:
    whole = max(round(seconds), 0)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    return (
        (f"{days} d " if days else "")
        + (f"{hours}:{minutes:02d}" if days or hours else f"{minutes}")
        + f":{whole % 60:02d}"
    )


def _starts(run: Run) -> str:
    starts = run.starts
    kept = starts if len(starts) <= _MOST_STARTS else [*starts[:5], None, *starts[-(_MOST_STARTS - 5) :]]
    rows = []
    for start in kept:
        if start is None:
            rows.append([f"… {len(starts) - _MOST_STARTS} more …", "", "", "", "", ""])
            continue
        when = moment(start.get("time"))
        time = f"{when:%Y-%m-%d %H:%M:%S}" if when else _text(start.get("time"))
        keys = ("from_step", "world", "strategy", "launcher", "why")
        rows.append([time, *(_text(start.get(key)) for key in keys)])
    return _table(["when (UTC)", "from step", "ranks", "strategy", "launcher", "why"], rows)


def _settings(run: Run) -> str:
    changed, own, others = choices(run.part("config"), run.part("sources"))
    parts = []
    if changed:
        rows = [[_setting(c), escape(c.value), escape(c.default), escape(c.source)] for c in changed]
        parts.append("<h3>Other than the defaults</h3>" + _table(["setting", "value", "default", "set by"], rows))
    for title, found in (("The recipe's own", own), ("As by default", others)):
        if found:
            table = _table(["setting", "value"], [[_setting(c), escape(c.value)] for c in found])
            body = (
                f"<h3>{title}</h3>{table}"
                if found is own
                else f"<details><summary>{title} ({len(found)})</summary>{table}</details>"
            )
            parts.append(body)
    return "".join(parts) or "<p>run.json names none.</p>"


def _setting(choice: Choice) -> str:
    return f'<code title="{escape(choice.doc)}">{escape(choice.name)}</code>'


def _versions(run: Run) -> str:
    rows = [[_text(name), _text(value)] for name, value in list(run.part("versions").items())[:50]]
    return _table(["what", "version"], rows) if rows else "<p>run.json names none.</p>"


def _previews(gallery: Gallery) -> str:
    parts = []
    for name, steps in gallery.shown.items():
        (step, newest), *earlier = steps
        older = "".join(f"<figure><figcaption>step {compact(at)}</figcaption>{html}</figure>" for at, html in earlier)
        more = f"<details><summary>earlier ({len(earlier)})</summary>{older}</details>" if earlier else ""
        caption = f"<figcaption><h3>{escape(clipped(name, 120))}</h3><span>step {compact(step)}</span></figcaption>"
        parts.append(f'<figure class="card preview">{caption}{newest}{more}</figure>')
    shown_parts = f'<div class="previews">{"".join(parts)}</div>' if parts else ""
    left_out = "".join(f"<li>{escape(clipped(line, 200))}</li>" for line in gallery.left_out[:20])
    return shown_parts + (f'<p class="note">Not shown:</p><ul class="note">{left_out}</ul>' if left_out else "")


def _footer(run: Run, now: datetime) -> str:
    said = [f"Written by unisono {__version__} on {now:%Y-%m-%d at %H:%M} UTC from the run's folder."]
    for file, count in run.damaged.items():
        if count:
            said.append(f"{a_count(count, 'line')} of {file} skipped (damaged or half-written).")
    if run.metrics.left_out:
        names = ", ".join(clipped(name, 60) for name in sorted(run.metrics.left_out)[:5])
        said.append(f"{METRICS} has more metrics than fit here; left out among others: {names}.")
    return f"<footer><p>{escape(' '.join(said))}</p></footer>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; its cells are HTML already."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="card table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(value: Any) -> str:
    """Anything from run.json, escaped."""
    return escape(clipped(shown(value), 200))
