"""Estimates the remaining duration of a long run from its first steps."""

from __future__ import annotations

import time
from collections.abc import Callable

from unisono.formatting import format_duration

LONG_S = 600.0
"""Minimum duration, in seconds, of a run that gets an estimate. In shorter runs, the progress line is enough."""
_MEASURED_S, _MEASURED_STEPS = 3.0, 2
_ENDLESS = 10**8  # a run with more steps than this ends when the user's own loop ends, so it cannot be estimated


class Forecast:
    """Measures the first steps of a run, except the very first one, which compiles, allocates and prefetches."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None
        self._done = False

    def step(self, step: int, total: int) -> str | None:
        """Returns the estimate in the first call after enough steps were measured, and None in all other calls.

        `step` is the step that has just ended, and `total` the last step of the run.
        """
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
            f"about {duration} for the {steps_left:,} remaining steps, at {step_time} each; Ctrl-C saves and stops, "
            "the same command continues the run, and --max_steps or --num_epochs sets its length"
        )
