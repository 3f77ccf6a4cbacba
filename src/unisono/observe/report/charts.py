"""Which metrics are drawn together, in which order, and how."""

from __future__ import annotations

from collections.abc import Iterable

from unisono.observe.report.chart import Chart, Line, Mark
from unisono.observe.report.reading import Metrics
from unisono.observe.report.series import Curves, Series
from unisono.observe.report.timeline import Timeline
from unisono.observe.report.words import a_count, clipped, compact

_EVAL = "eval/"
_NOISY = 40  # values from which on a running mean says more than the values
_FEW = 60  # values that are drawn as dots too
_MOST_MARKS = 40
_MOST_BESIDE = 6  # further lines in a chart: there are eight colours
_MARKED = {
    "restart": "restart",
    "hang": "hang",
    "oom": "oom",
    "nan": "nan",
    "signal": "signal",
    "save_failed": "save failed",
    "bad_sample": "bad sample",
    "worker_died": "worker died",
    "straggler": "slow rank",
}
"""Events that are marked in charts, the most important first."""

_SPEED = {"samples_per_s", "step_ms", "data_wait_ms", "comm_ms", "mem_gib", "mfu"}


def learning_charts(metrics: Metrics, timeline: Timeline) -> list[Chart]:
    """How well it learns: the loss first, then what was evaluated, then the recipe's and the optimizer's numbers."""
    series = metrics.series
    taken = {"loss", "lr", "grad_norm", f"{_EVAL}loss"} | _SPEED
    evaluated = [name for name in series if name.startswith(_EVAL) and name not in taken]
    own = [name for name in series if name not in taken and f"{_EVAL}{name}" not in series and name not in evaluated]
    beside = _beside(evaluated)
    charts = [
        _train_and_eval("loss", "Loss", series, may_be_log=True, marks=marks(timeline)),
        *(_of_curves(name, curves) for name, curves in metrics.curves.items()),
        *(_evaluated(name, beside[name], series) for name in beside),
        *(_train_and_eval(name, name, series) for name in own),
        _chart("Gradient norm", [("before clipping", series.get("grad_norm"))], may_be_log=True),
        _chart("Learning rate", [("learning rate", series.get("lr"))], from_zero=True, noisy=False),
    ]
    return [chart for chart in charts if chart is not None]


def speed_charts(metrics: Metrics, timeline: Timeline) -> list[Chart]:
    """How fast it goes, and what it takes."""
    series = metrics.series
    times = [("step", "step_ms"), ("waiting for data", "data_wait_ms"), ("communication", "comm_ms")]
    ranks = [(f"rank {rank}", found) for rank, found in sorted(metrics.by_rank.items())]
    happened = marks(timeline)
    charts = [
        _chart("Throughput", [("samples/s", series.get("samples_per_s"))], from_zero=True, marks=happened),
        _chart("Time per step", [(name, series.get(key)) for name, key in times], unit="ms", from_zero=True),
        _chart(
            "Each rank's own time per step",
            ranks if len(ranks) > 1 else [],
            unit="ms",
            from_zero=True,
            note="Before it waits for the others: a rank that is slower holds up all.",
        ),
        _chart("Memory", [("peak", series.get("mem_gib"))], unit="GiB", from_zero=True, noisy=False),
        _chart("Model FLOPs utilization", [("MFU", series.get("mfu"))], from_zero=True),
    ]
    return [chart for chart in charts if chart is not None]


def marks(timeline: Timeline) -> list[Mark]:
    """The faults as places on the step axis, the most important first."""
    order = {kind: place for place, kind in enumerate(_MARKED)}
    found = sorted((h for h in timeline.all() if h.kind in _MARKED), key=lambda happening: order[happening.kind])
    return [
        Mark(h.step, _MARKED[h.kind], f"step {compact(h.step)}: {h.title}, {clipped(h.sentence, 160)}")
        for h in found[:_MOST_MARKS]
        if h.step is not None
    ]


def _beside(names: Iterable[str]) -> dict[str, list[str]]:
    """Each metric with those that say the same of something else: `eval/MRR@10` with `eval/MRR@10_bm25`."""
    found: dict[str, list[str]] = {name: [] for name in names}
    every = list(found)
    for name in every:
        base = next((other for other in sorted(every, key=len) if name.startswith(f"{other}_")), None)
        if base is not None and len(found[base]) < _MOST_BESIDE:  # the shortest one, which is beside nothing itself
            found[base].append(name)
            del found[name]
    return found


def _evaluated(name: str, beside: Iterable[str], series: dict[str, Series]) -> Chart | None:
    title = name.removeprefix(_EVAL)
    others = [(other.removeprefix(f"{name}_"), series[other]) for other in beside]
    return _chart(title, [*_pair(title, series), *others], may_be_log="loss" in title)


def _train_and_eval(
    name: str, title: str, series: dict[str, Series], *, may_be_log: bool = False, marks: Iterable[Mark] = ()
) -> Chart | None:
    return _chart(title, _pair(name, series), may_be_log=may_be_log or "loss" in name, marks=marks)


def _pair(name: str, series: dict[str, Series]) -> list[tuple[str, Series | None]]:
    return [("training", series.get(name)), ("evaluation", series.get(f"{_EVAL}{name}"))]


def _chart(
    title: str,
    named: Iterable[tuple[str, Series | None]],
    *,
    unit: str = "",
    from_zero: bool = False,
    may_be_log: bool = False,
    noisy: bool = True,
    marks: Iterable[Mark] = (),
    note: str = "",
) -> Chart | None:
    lines, gaps = [], 0
    for colour, (name, series) in enumerate(named):
        if series is None:
            continue
        gaps += series.gaps
        evaluated = name == "evaluation"
        trend = series.trend() if noisy and not evaluated and series.count >= _NOISY else None
        dots = evaluated and series.count <= _FEW
        if series.count:
            lines.append(Line(name, series.points(), colour, trend, dots=dots))
    if not lines:
        return None
    if gaps:
        note = f"{a_count(gaps, 'value')} not finite, left out. {note}".strip()
    return Chart(title, lines, "step", unit, from_zero, may_be_log, list(marks), note)


def _of_curves(name: str, curves: Curves) -> Chart | None:
    if curves.newest is None:
        return None
    step, newest = curves.newest
    older = curves.older()
    lines = [Line(f"step {compact(at)}", curve.points(), old=True) for at, curve in older]
    lines.append(Line(f"step {compact(step)}", newest.points(), dots=newest.count <= _FEW))
    title = name.removeprefix(_EVAL)
    stem, by, what = title.rpartition("_by_")
    x_name = what.replace("_", " ") if by and stem else "index"
    note = f"Bold: the newest. Faint: earlier ones, from step {compact(older[0][0])} on." if older else ""
    return Chart(title, lines, x_name, note=note)
