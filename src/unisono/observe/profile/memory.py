"""Computes memory over time from a trace, and the blocks that were allocated at its peak."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from unisono.observe.profile.trace import Allocation, Point, Trace, innermost

MOST_POINTS = 1500
MOST_BLOCKS = 20


def memory_over_time(trace: Trace, *, on_device: bool) -> dict[str, Any]:
    """Returns the points of the curve, its peak, the largest blocks at the peak, and the times of steps and phases.

    On a GPU the curve is all memory that torch has allocated there. On the CPU torch counts only what it has seen since
    the profile began, so the curve is the change since then. Times are in milliseconds since the first step.
    """
    steps, changes = trace.steps, trace.memory
    if not steps or not changes:
        return {}
    origin = steps[0][1].begin
    levels = _levels(changes, on_device=on_device)
    inside = [place for place, change in enumerate(changes) if change.time >= origin] or [len(changes) - 1]
    peak = max(inside, key=lambda place: levels[place])
    return {
        "unit": "bytes",
        "baseline": 0 if on_device else None,
        "peak_bytes": levels[peak],
        "peak_ms": round((changes[peak].time - origin) / 1e3, 4),
        "points": _thinned([((changes[place].time - origin) / 1e3, levels[place]) for place in inside]),
        "blocks": _blocks(trace, changes[: peak + 1], origin),
        "steps": [[number, *_range(mark.begin, mark.end, origin)] for number, mark in steps],
        "phases": [
            [mark.name, *_range(mark.begin, mark.end, origin)]
            for mark in sorted(trace.marks)
            if not mark.name.startswith("step ")
        ],
    }


def _levels(changes: list[Allocation], *, on_device: bool) -> list[int]:
    if on_device:
        return [change.total for change in changes]
    levels, level = [], 0
    for change in changes:
        level += change.num_bytes
        levels.append(level)
    return levels


def _blocks(trace: Trace, changes: list[Allocation], origin: float) -> list[dict[str, Any]]:
    """Returns the largest blocks that were allocated in the profile and alive after these changes."""
    alive: dict[int, Allocation] = {}
    for change in changes:
        if change.num_bytes > 0:
            alive[change.address] = change
        else:
            alive.pop(change.address, None)
    largest = sorted(alive.values(), key=lambda each: each.num_bytes, reverse=True)[:MOST_BLOCKS]
    names = innermost(trace.operators, [Point(each.time, each.thread) for each in largest])
    marks = sorted(mark for mark in trace.marks if not mark.name.startswith("step "))
    begins, steps = [mark.begin for mark in marks], trace.steps
    step_begins = [mark.begin for _, mark in steps]
    blocks = []
    for block, name in zip(largest, names, strict=True):
        place, step = bisect_right(begins, block.time) - 1, bisect_right(step_begins, block.time) - 1
        in_phase = place >= 0 and block.time <= marks[place].end
        blocks.append(
            {
                "bytes": block.num_bytes,
                "operator": name or "",
                "phase": marks[place].name if in_phase else "",
                "step": steps[step][0] if step >= 0 else None,
                "ms": round((block.time - origin) / 1e3, 4),
            }
        )
    return blocks


def _thinned(points: list[tuple[float, int]]) -> list[list[float]]:
    """Reduces the curve to about MOST_POINTS points: the lowest and the highest of each group of neighbours."""
    size = -(-len(points) // (MOST_POINTS // 2))
    if size <= 2:
        return [[round(time, 4), level] for time, level in points]
    kept: list[list[float]] = []
    for begin in range(0, len(points), size):
        group = points[begin : begin + size]
        low, high = min(group, key=lambda each: each[1]), max(group, key=lambda each: each[1])
        kept += [[round(time, 4), level] for time, level in sorted({low, high})]
    return kept


def _range(begin: float, end: float, origin: float) -> tuple[float, float]:
    return round((begin - origin) / 1e3, 4), round((end - origin) / 1e3, 4)
