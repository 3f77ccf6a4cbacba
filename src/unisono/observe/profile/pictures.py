"""Draws the pictures of a profile: where each rank's step spends its time, and memory over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.formatting import format_bytes, format_number, shorten
from unisono.observe.profile.svg import legend, picture, rectangle, rule, text
from unisono.observe.profile.waits import DEVICE, HOST

MOST_RANKS = 32
_WIDTH, _LEFT, _BAR = 960.0, 88.0, 20.0
_PHASES = ("data", "begin", "forward", "backward", "reduce", "optimizer")
_COLOURS = {
    **{"data": 1, "wait for data": 1, "communication": 3, "reduce": 3, "wait for other ranks": 4, "compute": 0},
    **{"forward": 0, "backward": 5, "optimizer": 2, "copies": 6, "other": 6, "begin": 6},
    **{"between steps": 7, "wait for the host": 7},
}


def waits_picture(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Draws one bar per rank with the parts of its mean step, on the host and, if there is one, on the device."""
    shown = ranks[:MOST_RANKS]
    longest = max((rank["step_ms"] for rank in shown), default=0.0) or 1.0
    parts, y = [], 26.0
    for key, names, title in (
        ("device_ms", DEVICE, "On the device: what the GPU does, and what it waits for"),
        ("host_ms", HOST, "On the host: where the Python process spends the step"),
    ):
        if not any(rank[key] for rank in shown):
            continue
        used = [name for name in names if any(rank[key].get(name, 0.0) > 0 for rank in shown)]
        parts.append(text(16, y, title, "title"))
        drawn, y = legend(16, y + 22, [(name, _COLOURS[name]) for name in used], _WIDTH - 16)
        parts += drawn
        for rank in shown:
            parts += _bar(rank, rank[key], used, y, longest)
            y += _BAR + 8
        y += 30
    if len(ranks) > len(shown):
        parts.append(text(16, y - 14, f"… and {len(ranks) - len(shown)} more ranks: see summary.json", "soft"))
        y += 12
    return picture(_WIDTH, y - 12, parts, "Where the step of each rank waits")


def _bar(
    rank: Mapping[str, Any], values: Mapping[str, float], names: Sequence[str], y: float, longest: float
) -> list[str]:
    scale = (_WIDTH - _LEFT - 100) / longest
    parts, x = [text(_LEFT - 10, y + 14, f"rank {rank['rank']}", "right")], _LEFT
    for name in names:
        width = values.get(name, 0.0) * scale
        if width > 0:
            share = values[name] / rank["step_ms"] if rank["step_ms"] else 0.0
            tip = f"rank {rank['rank']}, {name}: {format_number(values[name], 3)} ms, {share:.0%}"
            parts.append(rectangle(x, y, width, _BAR, _COLOURS[name], tip))
        x += width
    return [*parts, text(x + 8, y + 14, f"{format_number(rank['step_ms'], 3)} ms", "soft")]


def memory_picture(memory: Mapping[str, Any], title: str) -> str:
    """Draws memory over time, with the phases of the steps below it and the largest blocks at the peak."""
    left, right, top, height = 88.0, _WIDTH - 20, 44.0, 240.0
    points = memory["points"]
    end = max([memory["steps"][-1][2], *(time for time, _ in points)]) or 1.0
    lowest, highest = min(0, *(level for _, level in points)), max(1, memory["peak_bytes"])

    def x_of(time: float) -> float:
        return left + (right - left) * max(0.0, time) / float(end)

    def y_of(level: float) -> float:
        return top + height * float(highest - level) / float(highest - lowest)

    parts = [text(16, 24, title, "title")]
    for share in range(5):
        level = lowest + (highest - lowest) * share / 4
        parts += [
            rule(left, y_of(level), right, y_of(level)),
            text(left - 8, y_of(level) + 4, _size(level), "soft right"),
        ]
    path, area = _step_line(points, x_of, y_of, end), f"V{y_of(lowest):.1f}H{x_of(points[0][0]):.2f}Z"
    parts += [f'<path class="area" d="{path}{area}"/>', f'<path class="line" d="{path}"/>']
    parts += _phases(memory, x_of, top + height + 8)
    at = x_of(memory["peak_ms"])
    side = "right" if at > (left + right) / 2 else ""
    parts += [
        f'<circle class="peak" cx="{at:.1f}" cy="{y_of(memory["peak_bytes"]):.1f}" r="4"/>',
        text(at + (-8 if side else 8), y_of(memory["peak_bytes"]) - 7, f"peak {_size(memory['peak_bytes'])}", side),
    ]
    used = [name for name in _PHASES if any(phase[0] == name for phase in memory["phases"])]
    drawn, y = legend(left, top + height + 58, [(name, _COLOURS[name]) for name in used], right)
    parts += drawn
    if memory["blocks"]:
        parts.append(text(16, y + 16, "Largest blocks at the peak that were allocated during the profile", "title"))
        y += 40
        largest = max(block["bytes"] for block in memory["blocks"])
        for block in memory["blocks"][:12]:
            origin = ", ".join(filter(None, (block["phase"], f"step {block['step']}" if block["step"] else "")))
            parts += [
                text(left - 8, y, _size(block["bytes"]), "right"),
                rectangle(left, y - 10, 260 * block["bytes"] / largest, 12, _COLOURS.get(block["phase"], 7)),
                text(left + 270, y, f"{block['operator'] or 'outside of operators'}  ({origin or 'no phase'})", "soft"),
            ]
            y += 19
    return picture(_WIDTH, y + 6, parts, title)


def _step_line(points: Sequence[Sequence[float]], x_of: Any, y_of: Any, end: float) -> str:
    path = f"M{x_of(points[0][0]):.2f} {y_of(points[0][1]):.1f}"
    for time, level in points[1:]:
        path += f"H{x_of(time):.2f}V{y_of(level):.1f}"
    return f"{path}H{x_of(end):.2f}"


def _phases(memory: Mapping[str, Any], x_of: Any, y: float) -> list[str]:
    parts = []
    for name, begin, end in memory["phases"]:
        tip = f"{name}: {format_number(end - begin, 3)} ms"
        parts.append(rectangle(x_of(begin), y, x_of(end) - x_of(begin), 10, _COLOURS.get(name, 7), tip))
    shown = memory["steps"][:: max(1, len(memory["steps"]) // 20)]
    for number, begin, _ in shown:
        parts += [
            rule(x_of(begin), y - 8, x_of(begin), y + 16),
            text(min(x_of(begin) + 3, _WIDTH - 58), y + 24, f"step {number}", "soft"),
        ]
    return parts


def _size(num_bytes: float) -> str:
    return f"−{format_bytes(-num_bytes)}" if num_bytes < 0 else format_bytes(num_bytes)


def memory_title(rank: int, device: str) -> str:
    """Returns the title of the picture of a rank's memory."""
    if device == "cpu":
        return f"Memory of rank {rank}: what torch allocated on the CPU since the profile began"
    return f"Memory of rank {rank}: what torch has allocated on {shorten(device, 60)}"
