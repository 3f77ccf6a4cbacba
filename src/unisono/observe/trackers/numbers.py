"""Turns a record of metrics.jsonl into the numbers that a tracker can draw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NOT_FINITE = ("nan", "inf", "-inf")
_LISTS_OF_RANKS = "_by_rank"


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers in a record, and three numbers for each curve of an evaluation (`curve_summaries`)."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, str) and value in _NOT_FINITE:
            numbers[name] = float(value)
        elif isinstance(value, int | float) and name != "step":
            numbers[name] = value
    curves = {name: value for name, value in record.items() if not name.endswith(_LISTS_OF_RANKS)}
    return numbers | curve_summaries(curves)


def curve_summaries(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Summarises each curve of an evaluation in three numbers: its first value, mean and last value.

    The name of the number is appended, as in eval/loss_by_level/first. With one chart per point, the other charts would
    be hard to find. The report page shows the whole curve.
    """
    scalars: dict[str, float] = {}
    for name, curve in metrics.items():
        if isinstance(curve, list) and curve:
            values = [float(value) for value in curve]  # "nan" in metrics.jsonl
            ends = {"first": values[0], "mean": sum(values) / len(values), "last": values[-1]}
            scalars |= {f"{name}/{which}": value for which, value in ends.items()}
    return scalars
