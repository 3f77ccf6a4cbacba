"""The live page: the parts of a run, or the list of all runs, as HTML; the browser replaces only changed parts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from unisono.formatting import format_count, format_duration, format_number, shorten
from unisono.observe.report import page as report_page
from unisono.observe.report.parts import as_text, charts_and_values, facts, faults, preview_cards, tiles
from unisono.observe.report.previews import read_previews
from unisono.observe.watch.folder_of_runs import Runs
from unisono.observe.watch.live_run import LiveRun
from unisono.observe.watch.rank_rows import rank_rows, used_columns
from unisono.pages.chart import sparkline
from unisono.pages.kit import render, render_part

_TEMPLATE = Path(__file__).with_name("watch.html")
_PARTS = Path(__file__).with_name("watch_parts.html")
_REPORT = Path(report_page.__file__).with_name("report.html")
_MOST_EVENTS = 30

Parts = dict[str, Markup]
"""The parts of a page by name, in order."""


class RunView:
    """Draws the parts of a run; draws expensive parts only if something has changed."""

    def __init__(self, run: LiveRun, name: str) -> None:
        self.run, self.name = run, name
        self._drawn: Parts = {}
        self._version = -1
        self._num_previews = -1

    def parts(self) -> Parts:
        """Returns the parts as they are now."""
        if self._version != self.run.version:
            self._version = self.run.version
            self._drawn = self._draw_slow_parts()
        return {"head": self._head(), "ranks": self._ranks(), **self._drawn}

    def _head(self) -> Markup:
        live = self.run
        run, (status, sentence) = live.run, live.state
        left = live.seconds_left
        progress = {
            "step": format_number(live.step),
            "total": format_number(live.total_steps) if live.total_steps else "",
            "fraction": min(1.0, live.step / live.total_steps) if live.total_steps else None,
            "left": "" if left is None else f"{format_duration(left)} left",
            "reading": "" if live.fraction_read >= 1 else f"reading metrics.jsonl: {live.fraction_read:.0%}",
        }
        head = {
            "recipe": as_text(run.record.get("recipe")),
            "folder": shorten(str(live.folder), 200),
            "status": status,
            "sentence": sentence,
            "facts": facts(run, datetime.now(UTC)),
            "tiles": [(shorten(label, 60), value, more) for label, value, more in tiles(run)],
        }
        return _draw("head", head, progress)

    def _ranks(self) -> Markup:
        rows, num_more = rank_rows(self.run.ranks)
        return _draw("ranks", rows, used_columns(rows), num_more)

    def _draw_slow_parts(self) -> Parts:
        run = self.run.run
        drawn = charts_and_values(run)
        first, last = run.timeline.events()
        events = faults(run)
        rows = [*events["first_events"], *events["last_events"]]
        num_hidden = len(rows) - _MOST_EVENTS + (len(first) + len(last) - len(rows)) if len(rows) > _MOST_EVENTS else 0
        parts = {
            "learning": _draw("charts", "Learning", drawn["learning_charts"], drawn["learning_values"]),
            "events": _draw("events", events["fault_summary"], rows[-_MOST_EVENTS:][::-1], num_hidden),
            "speed": _draw("charts", "Speed and memory", drawn["speed_charts"], drawn["speed_values"]),
        }
        num_previews = run.timeline.counts["preview"]
        if num_previews != self._num_previews:
            self._num_previews = num_previews
            gallery = read_previews(run.folder)
            self._previews = _draw("previews", preview_cards(gallery), [])
        return {**parts, "previews": self._previews}


def list_parts(runs: Runs) -> Parts:
    """Returns the list of all runs."""
    cards = []
    for name, live in runs.by_name.items():
        loss, left = live.run.metrics.series.get("loss"), live.seconds_left
        status, sentence = live.state
        numbers = [f"step {format_number(live.step)}{f' of {live.total_steps:,}' if live.total_steps else ''}"]
        if loss is not None and loss.last is not None:
            numbers.append(f"loss {format_number(loss.last[1])}")
        if left is not None:
            numbers.append(f"{format_duration(left)} left")
        if live.ranks:
            numbers.append(format_count(len(live.ranks), "rank"))
        cards.append(
            {
                "name": shorten(name, 120),
                "link": f"run?name={quote(name, safe='')}",
                "recipe": as_text(live.run.record.get("recipe")),
                "status": status,
                "sentence": shorten(sentence, 160),
                "numbers": numbers,
                "fraction": min(1.0, live.step / live.total_steps) if live.total_steps else None,
                "curve": sparkline(loss.points() if loss is not None else []),
            }
        )
    return {"runs": _draw("runs", cards, runs.num_omitted)}


def whole_page(title: str, parts: Parts, state: str, *, home: bool) -> str:
    """Returns the page with its parts. `state` is the URL of their changes; `home` adds a link to the list of runs."""
    return render(
        _TEMPLATE,
        kind="watch",
        title=title,
        charts=True,
        shares=_REPORT,
        connects=True,
        state=state,
        home=home,
        parts=[(name, digest(html), html) for name, html in parts.items()],
    )


def changed_parts(parts: Parts, seen: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Returns the parts that differ from those that the browser shows: name, digest, HTML."""
    digests = {name: digest(html) for name, html in parts.items()}
    return [(name, digests[name], str(html)) for name, html in parts.items() if seen.get(name) != digests[name]]


def digest(html: str) -> str:
    """Returns a short fingerprint of a part."""
    return hashlib.sha256(html.encode()).hexdigest()[:12]


def _draw(macro: str, *arguments: object) -> Markup:
    return render_part(_PARTS, macro, *arguments, shares=_REPORT)
