"""Computes the tables of operators and kernels: their own time on host and device, and the number of calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from unisono.formatting import shorten
from unisono.observe.profile.trace import Point, Span, Trace, innermost

MOST_ROWS = 30
LONGEST_NAME = 160


def self_times(operators: Sequence[Span]) -> dict[str, tuple[float, int]]:
    """Returns the time in microseconds that each operator spent outside of inner operators, and its calls."""
    by_thread: dict[Any, list[Span]] = defaultdict(list)
    for operator in operators:
        by_thread[operator.thread].append(operator)
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for spans in by_thread.values():
        stack: list[Span] = []
        for span in sorted(spans, key=lambda each: (each.begin, -each.end)):
            while stack and stack[-1].end <= span.begin:
                stack.pop()
            duration = span.end - span.begin
            times[span.name] += duration
            calls[span.name] += 1
            if stack:  # a range that outlives its enclosing range counts only until the enclosing range ends
                times[stack[-1].name] -= min(span.end, stack[-1].end) - span.begin
            stack.append(span)
    return {name: (max(0.0, time), calls[name]) for name, time in times.items()}


def operator_rows(trace: Trace, num_steps: int) -> list[dict[str, Any]]:
    """Returns the operators with the most own time on the device, or on the host if there is no device.

    Times are in milliseconds per step. A kernel counts for the innermost operator that launched it.
    """
    host = self_times(trace.operators)
    device: dict[str, float] = defaultdict(float)
    launched = [kernel for kernel in trace.kernels if kernel.launch in trace.launches]
    points = [trace.launches[kernel.launch] for kernel in launched]
    for kernel, name in zip(launched, innermost(trace.operators, points), strict=True):
        if name is not None and kernel.launch not in trace.graph_launches:
            device[name] += kernel.end - kernel.begin
    total_host, total_device = sum(time for time, _ in host.values()), sum(device.values())
    key = (lambda name: device[name]) if total_device else (lambda name: host[name][0])
    return [
        {
            "name": shorten(name, LONGEST_NAME),
            "calls": host[name][1],
            "self_cpu_ms": _per_step(host[name][0], num_steps),
            "cpu_share": _share(host[name][0], total_host),
            "self_device_ms": _per_step(device[name], num_steps),
            "device_share": _share(device[name], total_device),
        }
        for name in sorted(host, key=key, reverse=True)[:MOST_ROWS]
    ]


def kernel_rows(trace: Trace, num_steps: int) -> list[dict[str, Any]]:
    """Returns the kernels and copies that took most of the device's time."""
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    kinds: dict[str, str] = {}
    for kernel in trace.kernels:
        times[kernel.name] += kernel.end - kernel.begin
        calls[kernel.name] += 1
        kinds[kernel.name] = kernel.kind
    total = sum(times.values())
    return [
        {
            "name": shorten(name, LONGEST_NAME),
            "kind": kinds[name],
            "calls": calls[name],
            "device_ms": _per_step(times[name], num_steps),
            "device_share": _share(times[name], total),
        }
        for name in sorted(times, key=lambda name: times[name], reverse=True)[:MOST_ROWS]
    ]


def attribution_notes(trace: Trace) -> list[str]:
    """Returns notes about kernels without an operator: kernels of CUDA graphs, and of code outside of operators."""
    total = sum(kernel.end - kernel.begin for kernel in trace.kernels)
    if not total:
        return []
    in_graphs = sum(k.end - k.begin for k in trace.kernels if k.launch in trace.graph_launches)
    others = [k for k in trace.kernels if k.launch not in trace.graph_launches]
    points = [trace.launches.get(kernel.launch, Point(-1.0, None)) for kernel in others]
    names = innermost(trace.operators, points)
    without = sum(k.end - k.begin for k, name in zip(others, names, strict=True) if name is None)
    notes = []
    if in_graphs:
        notes.append(
            f"{in_graphs / total:.0%} of the device time was replayed from a CUDA graph. The table of kernels contains "
            "this time, but the table of operators cannot, because a replay has kernels and no operators. Profile "
            "without cuda_graph to see the operators."
        )
    if without / total > 0.01:
        notes.append(
            f"{without / total:.0%} of the device time belongs to kernels that no operator launched, for instance "
            "compiled ones (triton_…). The table of kernels contains this time, the table of operators does not."
        )
    return notes


def _per_step(microseconds: float, num_steps: int) -> float:
    return round(microseconds / 1e3 / max(1, num_steps), 4)


def _share(part: float, total: float) -> float:
    return round(part / total, 4) if total else 0.0
