"""Decides which metrics share a chart, in which order the charts appear, and how each chart is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from markupsafe import Markup

from unisono.formatting import format_count, format_number, shorten
from unisono.observe.report.read import Metrics
from unisono.observe.report.series import Curves, Series
from unisono.observe.report.timeline import Timeline
from unisono.pages import chart as page_chart
from unisono.pages.chart import Chart, Line, Mark

_EVAL = "eval/"
_NOISY = 40  # a series with at least this many values also gets a running mean
_FEW = 60  # a line with at most this many values also gets dots
_MAX_MARKS = 40
_MAX_VARIANTS = 6  # number of variants in a chart with training and evaluation lines; there are eight colours
_MAX_BARS = 24
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

_UNORDERED = {"task", "goal", "class", "label", "group", "file", "video", "prompt", "language"}
"""Names of categories without an order, as in `…_by_task`. No line joins the points of their curves."""

_DEVICES = (
    ("mfu", "Model FLOPs utilization", ""),
    ("gpu_util", "GPU utilization", ""),
    ("gpu_power_w", "GPU power", "W"),
)
"""Metrics of each device, with the title and the unit of their charts."""

SPEED = {"samples_per_s", "step_ms", "data_wait_ms", "comm_ms", "compute_ms", "mem_gib", "mfu"}
SPEED |= {"gpu_util", "gpu_power_w"}


def learning_charts(metrics: Metrics, timeline: Timeline, named: Container[str] = ()) -> list[Chart]:
    """Returns the charts of the loss, the evaluation metrics, the recipe's own metrics and the optimizer's metrics.

    Curves in `named` are excluded. Their entries have names, and `bar_chart` draws them.
    """
    series = metrics.series
    in_turn = trained_in_turn(series)
    taken = {"loss", "lr", "grad_norm", f"{_EVAL}loss"} | SPEED
    taken |= {f"{group}/{name}" for group in in_turn for name in ("loss", "lr", "grad_norm")}
    taken |= {f"{_EVAL}{group}/loss" for group in in_turn}
    evaluated = [name for name in series if name.startswith(_EVAL) and name not in taken]
    grouped = groups(evaluated)
    in_groups = {name for lines in grouped.values() for name in lines.values()}
    own = [name for name in series if name not in taken and f"{_EVAL}{name}" not in series and name not in evaluated]
    variants = _with_variants(name for name in evaluated if name not in in_groups)
    charts = [
        *_losses(in_turn, series, marks(timeline)),
        *(_curve_chart(name, curves) for name, curves in metrics.curves.items() if name not in named),
        *(
            _chart(rest, [(group, series[name]) for group, name in lines.items()], may_be_log="loss" in rest, eval=True)
            for rest, lines in grouped.items()
        ),
        *(_evaluation(name, variants[name], series) for name in variants),
        *(_training_and_evaluation(name, name, series) for name in own),
        _chart("Gradient norm", _of_groups(in_turn, "grad_norm", "before clipping", series), may_be_log=True),
        _chart("Learning rate", _of_groups(in_turn, "lr", "learning rate", series), from_zero=True, noisy=False),
    ]
    return [chart for chart in charts if chart is not None]


def trained_in_turn(names: Collection[str]) -> list[str]:
    """Returns the groups of weights that the run trains in turn, whose metrics are `critic/loss`, `critic/lr`, …"""
    rates = [name.removesuffix("/lr") for name in names if name.endswith("/lr") and not name.startswith(_EVAL)]
    return [group for group in rates if f"{group}/loss" in names and f"{group}/grad_norm" in names]


def _losses(in_turn: Sequence[str], series: dict[str, Series], marks: Sequence[Mark]) -> list[Chart | None]:
    """Returns the chart of the loss, or one chart per group trained in turn, because their losses differ in scale."""
    if not in_turn:
        return [_training_and_evaluation("loss", "Loss", series, may_be_log=True, marks=marks)]
    return [
        _training_and_evaluation(f"{group}/loss", f"Loss of {group}", series, may_be_log=True, marks=marks)
        for group in in_turn
    ]


def _of_groups(
    in_turn: Sequence[str], name: str, title: str, series: dict[str, Series]
) -> list[tuple[str, Series | None]]:
    if not in_turn:
        return [(title, series.get(name))]
    return [(group, series.get(f"{group}/{name}")) for group in in_turn]


def speed_charts(metrics: Metrics, timeline: Timeline) -> list[Chart]:
    """Returns the charts of speed and memory for which the run has logged metrics."""
    series = metrics.series
    times = [("step", "step_ms"), ("waiting for data", "data_wait_ms"), ("communication", "comm_ms")]
    times.append(("computation", "compute_ms"))
    happened = marks(timeline)
    charts = [
        _chart("Throughput", [("samples/s", series.get("samples_per_s"))], from_zero=True, marks=happened),
        _chart("Time per step", [(name, series.get(key)) for name, key in times], unit="ms", from_zero=True),
        _ranks_chart(
            "Each rank's computation per step",
            computing := metrics.by_rank.get("compute_ms") or metrics.by_rank.get("own_ms", {}),
            unit="ms",
            note=f"The time excludes waiting for data and for other ranks. {_slowest(computing)}",
        ),
        _ranks_chart(
            "Each rank's wait for the others per step",
            metrics.by_rank.get("comm_ms", {}),
            unit="ms",
            note="The time for communication and for slower ranks that does not overlap with computation.",
        ),
        _chart("Memory", [("peak", series.get("mem_gib"))], unit="GiB", from_zero=True, noisy=False),
        *(
            _ranks_chart(title, metrics.by_rank.get(name, {}), series.get(name), unit=unit)
            for name, title, unit in _DEVICES
        ),
    ]
    return [chart for chart in charts if chart is not None]


def _ranks_chart(
    title: str, ranks: Mapping[int, Series], mean: Series | None = None, *, unit: str = "", note: str = ""
) -> Chart | None:
    """Returns a chart with a line for each rank if there are several, otherwise with the mean."""
    lines: list[tuple[str, Series | None]] = [("mean", mean)] if mean is not None else []
    if len(ranks) > 1:
        lines = [(f"rank {rank}", series) for rank, series in sorted(ranks.items())]
    return _chart(title, lines, unit=unit, from_zero=True, note=note)


def _slowest(ranks: Mapping[int, Series]) -> str:
    means = {rank: series.mean for rank, series in ranks.items() if series.count}
    if not means:
        return ""
    rank = max(means, key=means.__getitem__)
    return f"The slowest rank, on average rank {rank} with {format_number(means[rank], 3)} ms, sets the speed of all."


def marks(timeline: Timeline) -> list[Mark]:
    """Returns the faults as marks on the step axis, the most important first."""
    order = {kind: place for place, kind in enumerate(_MARKED)}
    events = sorted((event for event in timeline.all() if event.kind in _MARKED), key=lambda event: order[event.kind])
    return [
        Mark(e.step, _MARKED[e.kind], f"step {format_number(e.step)}: {e.title}, {shorten(e.sentence, 160)}")
        for e in events[:_MAX_MARKS]
        if e.step is not None
    ]


def groups(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Finds quantities that were measured for several groups. Each quantity gets one chart with a line per group.

    Returns quantity -> group -> metric. For instance, `eval/train_return`, `eval/train_solved`, `eval/unseen_return`
    and `eval/unseen_solved` are the quantities return and solved of the groups train and unseen. At least two groups
    must share at least two quantities, because metrics that share only one may be unrelated (`flow_loss`,
    `velocity_loss`).
    """
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        group, _, rest = name.removeprefix(_EVAL).partition("_")
        if rest:
            groups.setdefault(rest, {})[group] = name
    together = Counter(frozenset(lines) for lines in groups.values())
    return {rest: lines for rest, lines in groups.items() if len(lines) > 1 and together[frozenset(lines)] > 1}


def is_smoothed(series: Series) -> bool:
    """Whether a running mean is drawn. If so, the legend and the top of the page also show the mean."""
    return series.count >= _NOISY


def is_curve(series: Series) -> bool:
    """Whether the series is drawn as a line. Single and constant values are shown in a table instead."""
    return series.count > 1 and series.lowest < series.highest


def _with_variants(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns each metric with its variants, which share its chart, as `eval/MRR@10_bm25` does with `eval/MRR@10`."""
    variants: dict[str, list[str]] = {name: [] for name in names}
    every = list(variants)
    for name in every:
        base = next((other for other in sorted(every, key=len) if name.startswith(f"{other}_")), None)
        if base is not None and len(variants[base]) < _MAX_VARIANTS:  # the shortest such name is not itself a variant
            variants[base].append(name)
            del variants[name]
    return variants


def _evaluation(name: str, variants: Iterable[str], series: dict[str, Series]) -> Chart | None:
    title = name.removeprefix(_EVAL)
    others = [(other.removeprefix(f"{name}_"), series[other]) for other in variants]
    return _chart(title, [*_pair(title, series), *others], may_be_log="loss" in title, eval=True)


def _training_and_evaluation(
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
    eval: bool = False,
    marks: Iterable[Mark] = (),
    note: str = "",
) -> Chart | None:
    lines, gaps = [], 0
    named = list(named)
    if not any(series is not None and is_curve(series) for _, series in named):
        return None
    for colour, (name, series) in enumerate(named):
        if series is None:
            continue
        gaps += series.gaps
        evaluated = name == "evaluation" or (eval and name != "training")
        trend = series.trend() if noisy and not evaluated and is_smoothed(series) else None
        dots = evaluated and series.count <= _FEW
        if series.count:
            lines.append(Line(name, series.points(), colour, trend, dots=dots))
    if not lines:
        return None
    if gaps:
        note = f"Values that are not finite are not drawn ({format_count(gaps, 'value')}). {note}".strip()
    return Chart(
        title, lines, "step", unit, from_zero, may_be_log, list(marks), note, [series for _, series in named if series]
    )


def _curve_chart(name: str, curves: Curves) -> Chart | None:
    if curves.newest is None:
        return None
    step, newest = curves.newest
    older = curves.older()
    title = name.removeprefix(_EVAL)
    stem, by, what = title.rpartition("_by_")
    joined = what not in _UNORDERED
    lines = [Line(f"step {format_number(at)}", curve.points(), old=True, joined=joined) for at, curve in older]
    lines.append(
        Line(f"step {format_number(step)}", newest.points(), dots=newest.count <= _FEW or not joined, joined=joined)
    )
    x_name = what.replace("_", " ") if by and stem else "index"
    first = format_number(older[0][0]) if older else ""
    note = f"The bold line is the newest curve; faint lines are earlier ones, from step {first} on." if older else ""
    return Chart(title, lines, x_name, note=note)


def bar_chart(title: str, curves: Curves, labels: Sequence[str]) -> Markup:
    """Returns a chart with a bar for the newest value of each named entry. If there are many, shows the extremes."""
    if curves.newest is None:
        return Markup()
    step, newest = curves.newest
    values = [(labels[round(x) - 1], y) for x, y in newest.points() if 1 <= round(x) <= len(labels)]
    if not values:  # the labels in run.json may not match metrics.jsonl
        return Markup()
    note = ""
    if len(values) > _MAX_BARS:
        half = _MAX_BARS // 2
        values.sort(key=lambda pair: pair[1])
        note = f"The {half} lowest and the {half} highest of {len(values):,}."
        values = values[:half] + values[-half:]
    return page_chart.draw_bars(title, f"step {format_number(step)}", values, note)
