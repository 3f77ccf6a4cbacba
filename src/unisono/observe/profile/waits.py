"""Computes where the steps of a rank spend their time: on the host by phase, and on the device by what it waits for."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from unisono.observe.profile.intervals import Intervals, difference, intersection, length, union
from unisono.observe.profile.trace import Trace

HOST = ("data", "communication", "forward", "backward", "optimizer", "other", "between steps")
"""The parts of a step on the host. `other` is everything in a step that is in no phase."""
DEVICE = ("compute", "communication", "copies", "wait for data", "wait for other ranks", "wait for the host")
"""The parts of a step on the device. `communication` and `copies` count only while nothing computes."""

_PHASES = {"data": "data", "reduce": "communication", "forward": "forward", "backward": "backward"}
_PHASES |= {"optimizer": "optimizer"}


def waits(trace: Trace, comm_ms: float | None) -> dict[str, Any]:
    """Returns the mean step time in milliseconds, its parts on host and device, and the time of each step.

    `comm_ms` is the time per step in which this rank waited for others, as in metrics.jsonl; None for a single rank.
    """
    windows = _windows(trace)
    if not windows:
        return {"step_ms": 0.0, "steps_ms": [], "host_ms": {}, "device_ms": {}}
    num_steps = len({number for number, _, _, _ in windows})
    total = sum(end - begin for _, begin, _, end in windows) / 1e3 / num_steps
    by_step: dict[int, float] = {}
    for number, begin, end, _ in windows:
        by_step[number] = by_step.get(number, 0.0) + (end - begin) / 1e3
    host = _host(trace, windows, num_steps, comm_ms)
    device = _device(trace, windows, num_steps) if trace.kernels else {}
    return {
        "step_ms": round(total, 4),
        "steps_ms": [round(value, 4) for value in by_step.values()],
        "host_ms": _rounded(host),
        "device_ms": _rounded(device),
    }


def median_step_ms(parts: Mapping[str, Any]) -> float:
    """Returns the median time of the profiled steps, without the time between them."""
    return float(statistics.median(parts["steps_ms"])) if parts["steps_ms"] else 0.0


def _windows(trace: Trace) -> list[tuple[int, float, float, float]]:
    """Returns (number, begin, end, begin of the next) of every step; the last lasts until its kernels have ended."""
    steps = trace.steps
    begins = [mark.begin for _, mark in steps]
    last = max((mark.end for _, mark in steps), default=0.0)
    last = max([last, *(kernel.end for kernel in trace.kernels if begins and kernel.begin >= begins[0])])
    ends = [*begins[1:], last]
    return [(number, mark.begin, mark.end, max(mark.end, end)) for (number, mark), end in zip(steps, ends, strict=True)]


def _host(
    trace: Trace, windows: list[tuple[int, float, float, float]], num_steps: int, comm_ms: float | None
) -> dict[str, float]:
    parts = dict.fromkeys(HOST, 0.0)
    for mark in trace.marks:
        if mark.name in _PHASES:
            parts[_PHASES[mark.name]] += (mark.end - mark.begin) / 1e3 / num_steps
    in_steps = sum(end - begin for _, begin, end, _ in windows) / 1e3 / num_steps
    after = sum(next_begin - end for _, _, end, next_begin in windows) / 1e3 / num_steps
    parts["other"] = max(0.0, in_steps - sum(parts.values()))
    if comm_ms is None:  # a single rank: the phase contains only its own bookkeeping
        parts["other"] += parts["communication"]
        parts["communication"] = 0.0
    else:
        # Ranks also wait at the end of backward, for the last reduction, and at the beginning of a step, for buffers.
        missing = max(0.0, comm_ms - parts["communication"])
        for part in ("backward", "other"):
            moved = min(missing, parts[part])
            parts[part], parts["communication"] = parts[part] - moved, parts["communication"] + moved
            missing -= moved
    parts["between steps"] = after
    return parts


def _device(trace: Trace, windows: list[tuple[int, float, float, float]], num_steps: int) -> dict[str, float]:
    window: Intervals = union((begin, end) for _, begin, _, end in windows)
    busy = {
        kind: intersection(union((k.begin, k.end) for k in trace.kernels if k.kind == kind), window)
        for kind in ("compute", "communication", "copies")
    }
    communication = difference(busy["communication"], busy["compute"])
    copies = difference(difference(busy["copies"], busy["compute"]), busy["communication"])
    idle = difference(window, union([*busy["compute"], *busy["communication"], *busy["copies"]]))
    data = union((mark.begin, mark.end) for mark in trace.marks if mark.name == "data")
    ranks = union((mark.begin, mark.end) for mark in trace.marks if mark.name == "reduce")
    for_data, for_ranks = intersection(idle, data), intersection(idle, ranks)
    lengths = {
        "compute": length(busy["compute"]),
        "communication": length(communication),
        "copies": length(copies),
        "wait for data": length(for_data),
        "wait for other ranks": length(for_ranks),
        "wait for the host": length(difference(difference(idle, data), ranks)),
    }
    return {name: lengths[name] / 1e3 / num_steps for name in DEVICE}


def _rounded(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in parts.items()}
