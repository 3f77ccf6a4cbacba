"""Reads a Chrome trace of torch.profiler: operators on the host, kernels on the device, unisono's marks, memory.

The trace is a documented format, while the profiler's own objects differ between versions of torch. Times are in
microseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MARK = "unisono::"
"""Prefix of the ranges that unisono records: `unisono::step 7` and the phases of a step, such as `unisono::forward`."""

_COMMUNICATION = ("nccl", "rccl")
_COPIES = {"gpu_memcpy": "copies", "gpu_memset": "copies"}


class Span(NamedTuple):
    """An operator or a mark on a thread of the host."""

    begin: float
    end: float
    name: str
    thread: Any


class Kernel(NamedTuple):
    """A kernel or a copy on the device."""

    begin: float
    end: float
    name: str
    kind: str  # compute, communication or copies
    launch: Any  # correlation id of its launch


class Allocation(NamedTuple):
    """A block of memory that was allocated, or freed if `num_bytes` is negative."""

    time: float
    thread: Any
    address: int
    num_bytes: int
    total: int  # bytes allocated on this device at that time, according to torch


class Point(NamedTuple):
    """A moment on a thread."""

    time: float
    thread: Any


@dataclass
class Trace:
    """The parts of a trace from which the tables are computed."""

    operators: list[Span] = field(default_factory=list)
    marks: list[Span] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    launches: dict[Any, Point] = field(default_factory=dict)
    """The call on the host that launched a kernel, by correlation id."""
    graph_launches: set[Any] = field(default_factory=set)
    """Correlation ids of launches of CUDA graphs."""
    memory: list[Allocation] = field(default_factory=list)

    def named(self, name: str) -> list[Span]:
        """Returns the marks with this name, in order."""
        return sorted(mark for mark in self.marks if mark.name == name)

    @property
    def steps(self) -> list[tuple[int, Span]]:
        """The steps with their numbers, in order; a step that was repeated occurs twice."""
        marks = ((mark.name.split(), mark) for mark in self.marks if mark.name.startswith("step "))
        return sorted(((int(words[1]), mark) for words, mark in marks), key=lambda each: each[1].begin)


def read_trace(content: Mapping[str, Any], device: str = "cpu") -> Trace:
    """Reads the content of a Chrome trace; `device` is the type of device whose memory is read, cpu or cuda."""
    trace, device_type = Trace(), 1 if device == "cuda" else 0
    for event in content.get("traceEvents", ()):
        category, phase = event.get("cat"), event.get("ph")
        if phase == "X":
            _read_span(trace, category, event)
        elif event.get("name") == "[memory]":
            details = event["args"]
            if details.get("Device Type") == device_type:
                change, total = int(details["Bytes"]), int(details.get("Total Allocated", 0))
                trace.memory.append(Allocation(event["ts"], event["tid"], int(details["Addr"]), change, total))
    trace.memory.sort()
    return trace


def _read_span(trace: Trace, category: str | None, event: Mapping[str, Any]) -> None:
    begin, name = event["ts"], str(event["name"])
    end = begin + event.get("dur", 0)
    if category == "cpu_op" or (category == "user_annotation" and not name.startswith(MARK)):
        trace.operators.append(Span(begin, end, name, event["tid"]))
    elif category == "user_annotation":
        trace.marks.append(Span(begin, end, name.removeprefix(MARK), event["tid"]))
    elif category == "kernel" or category in _COPIES:
        communicates = any(word in name.lower() for word in _COMMUNICATION)
        kind = _COPIES.get(category, "communication" if communicates else "compute")
        trace.kernels.append(Kernel(begin, end, name, kind, event.get("args", {}).get("correlation")))
    elif category in ("cuda_runtime", "cuda_driver"):
        correlation = event.get("args", {}).get("correlation")
        trace.launches[correlation] = Point(begin, event["tid"])
        if "GraphLaunch" in name:
            trace.graph_launches.add(correlation)


def innermost(operators: Sequence[Span], points: Sequence[Point]) -> Iterator[str | None]:
    """Yields for each point the name of the innermost operator that runs on its thread at that moment, if any."""
    by_thread: dict[Any, list[int]] = defaultdict(list)
    for number, point in enumerate(points):
        by_thread[point.thread].append(number)
    spans: dict[Any, list[Span]] = defaultdict(list)
    for operator in operators:
        if operator.thread in by_thread:
            spans[operator.thread].append(operator)
    found: list[str | None] = [None] * len(points)
    for thread, numbers in by_thread.items():
        numbers.sort(key=lambda number: points[number].time)
        ordered, next_span, stack = sorted(spans[thread], key=lambda span: (span.begin, -span.end)), 0, list[Span]()
        for number in numbers:
            time = points[number].time
            while next_span < len(ordered) and ordered[next_span].begin <= time:
                _pop_ended(stack, ordered[next_span].begin)
                stack.append(ordered[next_span])
                next_span += 1
            _pop_ended(stack, time)
            found[number] = stack[-1].name if stack else None
    yield from found


def _pop_ended(stack: list[Span], time: float) -> None:
    while stack and stack[-1].end < time:
        stack.pop()
