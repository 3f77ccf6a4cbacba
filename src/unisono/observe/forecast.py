"""Estimates the duration of a long run from its first steps, for one line of output."""

from __future__ import annotations

import time
from collections.abc import Callable

from unisono.formatting import format_duration

LONG_S = 600.0
"""In seconds; for a shorter run, the remaining time on the progress line is enough."""
_MEASURED_S, _MEASURED_STEPS = 3.0, 2
_ENDLESS = 10**8  # number of steps of a run whose length the user's own loop decides


class Forecast:
    """Measures the first steps, except the very first, which compiles, allocates and prefetches."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None
        self._done = False

    def step(self, step: int, total: int) -> str | None:
        """Returns the estimate after this step of `total`, once, when enough steps were measured; otherwise None."""
        now = self._clock()
        if self._first is None:
            self._first = now, step
        then, first = self._first
        if self._done or now - then < _MEASURED_S or step - first < _MEASURED_STEPS:
            return None
        self._done = True
        seconds_per_step, steps_left = (now - then) / (step - first), total - step
        if seconds_per_step * steps_left < LONG_S or steps_left > _ENDLESS:
            return None
        duration = format_duration(seconds_per_step * steps_left)
        step_time = format_duration(seconds_per_step, precise=True)
        return (
            f"about {duration} for the {steps_left:,} remaining steps, at {step_time} each; "
            "Ctrl-C saves and stops, the same command continues; --max_steps or --num_epochs sets the length"
        )
