"""Renders the report of a run as one HTML file that needs neither a network nor a server."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from unisono import __version__
from unisono.formatting import format_count, shorten
from unisono.observe.folder import METRICS
from unisono.observe.profile.section import profile_section
from unisono.observe.report.parts import as_text, charts_and_values, facts, faults, preview_cards, status_of, tiles
from unisono.observe.report.previews import Gallery
from unisono.observe.report.read import Run
from unisono.observe.report.settings_table import settings_rows
from unisono.observe.report.timeline import parse_time
from unisono.pages.kit import render

KIND = "report"
_MAX_STARTS = 20


def page(run: Run, gallery: Gallery, now: datetime | None = None) -> str:
    """Returns the report of a run as HTML."""
    now = now or datetime.now(UTC)
    recipe, (status, status_sentence) = as_text(run.record.get("recipe")), status_of(run)
    changed, own, unchanged = settings_rows(run.part("config"), run.part("sources"), run.part("defaults"))
    return render(
        Path(__file__).with_name("report.html"),
        kind=KIND,
        title=f"{recipe} · {shorten(run.folder.resolve().name, 80)}",
        charts=True,
        recipe=recipe,
        folder=shorten(str(run.folder), 200),
        status=status,
        status_sentence=status_sentence,
        facts=facts(run, now),
        tiles_shown=[(shorten(label, 60), value, more) for label, value, more in tiles(run)],
        not_shown=[shorten(line, 200) for line in gallery.omitted[:20]],
        previews=preview_cards(gallery),
        starts=_starts(run),
        changed=changed,
        own=own,
        unchanged=unchanged,
        versions=[(as_text(name), as_text(value)) for name, value in list(run.part("versions").items())[:50]],
        footer=_footer(run, now),
        **charts_and_values(run),
        **profile_section(run.folder),
        **faults(run),
    )


def _starts(run: Run) -> list[list[str]]:
    starts = run.starts
    listed = starts if len(starts) <= _MAX_STARTS else [*starts[:5], None, *starts[-(_MAX_STARTS - 5) :]]
    rows = []
    for start in listed:
        if start is None:
            rows.append([f"… {len(starts) - _MAX_STARTS} more …", "", "", "", "", ""])
            continue
        when = parse_time(start.get("time"))
        time = f"{when:%Y-%m-%d %H:%M:%S}" if when else as_text(start.get("time"))
        keys = ("from_step", "world", "strategy", "launcher", "why")
        rows.append([time, *(as_text(start.get(key)) for key in keys)])
    return rows


def _footer(run: Run, now: datetime) -> str:
    sentences = [f"Written by unisono {__version__} on {now:%Y-%m-%d at %H:%M} UTC from the run folder."]
    for file, count in run.damaged.items():
        if count:
            were = "was" if count == 1 else "were"
            sentences.append(f"{format_count(count, 'line')} of {file} {were} skipped as damaged or incomplete.")
    if run.metrics.omitted:
        names = ", ".join(shorten(name, 60) for name in sorted(run.metrics.omitted)[:5])
        sentences.append(f"{METRICS} has more metrics than this page can show; it omits for instance {names}.")
    return " ".join(sentences)
