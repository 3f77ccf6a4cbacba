"""Arithmetic with sets of time intervals, each a sorted list of disjoint (begin, end) pairs."""

from __future__ import annotations

from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Returns the union of any intervals."""
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """Returns the parts that are in both sets."""
    common: Intervals = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(first: Intervals, second: Intervals) -> Intervals:
    """Returns the parts of the first set that are not in the second."""
    rest: Intervals = []
    j = 0
    for begin, end in first:
        while j < len(second) and second[j][1] <= begin:
            j += 1
        k = j
        while k < len(second) and second[k][0] < end:
            if second[k][0] > begin:
                rest.append((begin, second[k][0]))
            begin = max(begin, second[k][1])
            k += 1
        if begin < end:
            rest.append((begin, end))
    return rest


def length(intervals: Intervals) -> float:
    """Returns the total length."""
    return sum(end - begin for begin, end in intervals)
