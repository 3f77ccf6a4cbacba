"""Estimates how long a run takes to stop with a checkpoint, from the records of this run or of a similar one.

A scheduler warns a run before it ends it. When the warning comes, the run finishes its step, waits for a save that may
be in progress, and saves again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from unisono.errors import UserError
from unisono.observe.folder import EVENTS, METRICS
from unisono.observe.json_lines import JsonLines

_LEAST_S, _RESERVE_S, _MULTIPLE_S = 60, 30, 10


def seconds_to_stop(run: Path) -> int | None:
    """Returns a run's longest step plus twice its longest save, with a reserve; None if the run has saved nothing."""
    saves = _numbers((each for each in JsonLines(run / EVENTS) if each.get("kind") == "save"), "seconds")
    if not saves:
        return None
    longest_step = max(_numbers(JsonLines(run / METRICS), "step_ms"), default=0.0) / 1000
    seconds = _RESERVE_S + longest_step + 2 * max(saves)
    return max(_LEAST_S, _MULTIPLE_S * math.ceil(seconds / _MULTIPLE_S))


def measured_seconds(run: Path) -> int:
    """Like `seconds_to_stop`, for a run that the user names; raises UserError if it has saved nothing."""
    seconds = seconds_to_stop(run)
    if seconds is None:
        raise UserError(f"--like {run}: it is not a run folder, or the run has saved no checkpoint")
    return seconds


def _numbers(records: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    values = (record.get(name) for record in records)
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value) and value >= 0]
