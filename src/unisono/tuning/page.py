"""Writes the page of a study, study.html: best trial, history, importance and slices of each setting, all trials."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path

from markupsafe import Markup

from unisono import __version__
from unisono.atomic_files import write_atomically
from unisono.errors import UserError
from unisono.formatting import format_count, format_duration, format_number, shorten
from unisono.pages.chart import Chart, Line, draw, draw_bars
from unisono.pages.kit import generator, render
from unisono.tuning.study import Study, TrialResult

PAGE = "study.html"
KIND = "tune"
_MAX_CURVES = 200


def write_page(study: Study, output: Path | None = None) -> Path:
    """Writes the page of a study to `output` (default: study.html in its folder); returns its path."""
    file = output or study.folder / PAGE
    if file.exists() and generator(KIND).encode() not in file.read_bytes()[:2000]:
        raise UserError(f"{file} already exists and is not a page of unisono tune; choose another --output")
    try:
        write_atomically(file, page(study))
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{file} cannot be written ({reason}); choose another --output") from None
    return file


def page(study: Study, now: datetime | None = None) -> str:
    """Returns the page of a study as HTML."""
    now = now or datetime.now(UTC)
    charts = [chart for chart in (_history(study), _curves(study)) if chart is not None]
    slices = [chart for name in study.search for chart in _slice(study, name)]
    done = study.num_finished >= study.num_trials
    return render(
        Path(__file__).with_name("study.html"),
        kind=KIND,
        title=f"{study.recipe} · {shorten(study.folder.resolve().name, 80)}",
        charts=True,
        recipe=study.recipe,
        folder=shorten(str(study.folder), 200),
        status="done" if done else "unfinished",
        status_sentence=f"{study.num_finished} of {format_count(study.num_trials, 'trial')}"
        + ("" if done else "; run the same command to continue"),
        facts=_facts(study),
        tiles_shown=_tiles(study),
        best_command=study.best_command() or "",
        charts_shown=[draw(chart, number) for number, chart in enumerate(charts)],
        importance=_importance(study),
        slices=[draw(each, 100 + n) if isinstance(each, Chart) else each for n, each in enumerate(slices)],
        heads=["trial", "outcome", study.objective, "step", *study.search, "time", "note"],
        rows=[_row(study, trial) for trial in _ranked(study)],
        footer=f"Written by unisono {__version__} on {now:%Y-%m-%d at %H:%M} UTC from the folder of the study.",
    )


def _facts(study: Study) -> list[tuple[str, str]]:
    record = study.record
    facts = [("objective", f"{study.direction} {study.objective}")]
    facts += [("pruner", str(record.get("pruner"))), ("sampler", str(record.get("sampler")))]
    facts += [(f"search {name}", text) for name, text in study.search.items()]
    return [(name, shorten(value, 120)) for name, value in facts]


def _tiles(study: Study) -> list[tuple[str, str, str]]:
    best = study.best
    value = "none yet" if best is None or best.value is None else format_number(best.value)
    tiles = [(f"best {study.objective}", value, "" if best is None else f"trial {best.number}")]
    seconds = sum(trial.seconds or 0.0 for trial in study.trials)
    return [
        *tiles,
        ("complete", str(study.count("complete")), ""),
        ("pruned", str(study.count("pruned")), "stopped early"),
        ("failed", str(study.count("failed")), ""),
        ("time of all trials", format_duration(seconds), ""),
    ]


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _points(study: Study, state: str) -> list[TrialResult]:
    return [trial for trial in study.trials if trial.state == state and _finite(trial.value)]


def _history(study: Study) -> Chart | None:
    complete, pruned = _points(study, "complete"), _points(study, "pruned")
    if not complete:
        return None
    best, curve = None, []
    better = min if study.direction == "minimize" else max
    for trial in complete:
        assert trial.value is not None
        best = trial.value if best is None else better(best, trial.value)
        curve.append((float(trial.number), best))
    lines = [
        Line("best so far", curve, colour=0),
        Line("complete", [(float(t.number), t.value or 0.0) for t in complete], colour=2, joined=False),
    ]
    if pruned:
        lines.append(Line("pruned", [(float(t.number), t.value or 0.0) for t in pruned], colour=1, joined=False))
    return Chart(
        "History", lines, x_name="trial", may_be_log=True, note="For a pruned trial, the value of its last evaluation."
    )


def _curves(study: Study) -> Chart | None:
    """Draws the evaluations of all trials and highlights the best trial's curve."""
    lines = []
    for trial in study.trials[-_MAX_CURVES:]:
        points = [(float(step), value) for step, value in trial.evaluations if math.isfinite(value)]
        if len(points) < 2 or trial is study.best:
            continue
        lines.append(Line(f"trial {trial.number}", points, colour=1 if trial.state == "pruned" else 2, old=True))
    if study.best is not None:
        points = [(float(step), value) for step, value in study.best.evaluations if math.isfinite(value)]
        lines.append(Line(f"best, trial {study.best.number}", points, colour=0, dots=True))
    if not lines:
        return None
    return Chart("Evaluations of all trials", lines, may_be_log=True, note="Curves of pruned trials end early.")


def _importance(study: Study) -> Markup | None:
    if not study.importances:
        return None
    values = sorted(study.importances.items(), key=lambda item: -item[1])
    note = "The fraction of the variation among the better trials that each setting explains (PED-ANOVA)."
    return draw_bars("Importance of the settings", study.objective, values, note)


def _slice(study: Study, name: str) -> list[Chart | Markup]:
    """Draws the objective over one setting."""
    trials = [trial for state in ("complete", "pruned") for trial in _points(study, state) if name in trial.params]
    if not trials:
        return []
    if any(isinstance(trial.params[name], str) for trial in trials):
        return _choices(study, name)
    log = study.search[name].startswith("log:")
    lines = []
    for colour, state in ((2, "complete"), (1, "pruned")):
        points = sorted(
            (math.log10(t.params[name]) if log else float(t.params[name]), t.value or 0.0)
            for t in trials
            if t.state == state
        )
        if points:
            lines.append(Line(state, points, colour=colour, joined=False))
    x_name = f"log₁₀ {name}" if log else name
    return [Chart(f"{study.objective} over {name}", lines, x_name=x_name, may_be_log=True)]


def _choices(study: Study, name: str) -> list[Chart | Markup]:
    """Draws the best objective of each choice."""
    better = min if study.direction == "minimize" else max
    values: dict[str, list[float]] = {choice: [] for choice in study.search[name].split("|")}
    for trial in _points(study, "complete"):
        values.setdefault(str(trial.params.get(name)), []).append(trial.value or 0.0)
    bars = [(f"{choice} ({format_count(len(each), 'trial')})", better(each)) for choice, each in values.items() if each]
    return [draw_bars(f"Best {study.objective} by {name}", "complete trials", bars)] if bars else []


def _ranked(study: Study) -> list[TrialResult]:
    """Returns all trials: complete trials from best to worst, then the others."""
    sign = 1 if study.direction == "minimize" else -1
    order = {"complete": 0, "pruned": 1, "failed": 2, "unfinished": 3}

    def key(trial: TrialResult) -> tuple[int, float, int]:
        value = trial.value if trial.state == "complete" and trial.value is not None else 0.0
        return order[trial.state], sign * value, trial.number

    return sorted(study.trials, key=key)


def _row(study: Study, trial: TrialResult) -> list[str]:
    return [
        str(trial.number),
        trial.state,
        "" if trial.value is None else format_number(trial.value),
        "" if trial.step is None else format_number(trial.step),
        *(_shown(trial.params.get(name, "")) for name in study.search),
        "" if trial.seconds is None else format_duration(trial.seconds),
        shorten(trial.error, 120),
    ]


def _shown(value: object) -> str:
    return format_number(value) if isinstance(value, float) else shorten(str(value), 60)


def table_rows(study: Study, most: int) -> tuple[list[str], list[list[str]]]:
    """Returns the column heads and the first `most` rows of the table of trials, for the terminal."""
    heads = ["trial", "outcome", study.objective, "step", *study.search, "time"]
    return heads, [_row(study, trial)[:-1] for trial in _ranked(study)[:most]]
