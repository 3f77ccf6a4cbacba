"""Estimates the duration of a long run from its first steps, for one line of output."""

from __future__ import annotations

import time
from collections.abc import Callable

from unisono.formatting import format_duration

LONG_S = 600.0
"""Seconds; a shorter run shows what is left on its progress line soon enough."""
_MEASURED_S, _MEASURED_STEPS = 3.0, 2
_ENDLESS = 10**8  # steps; the end is decided by a loop of the user's


class Forecast:
    """Measures the first steps. The very first one is left out: it compiles, allocates and reads ahead."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None
        self._over = False

    def step(self, step: int, total: int) -> str | None:
        """What to say after this step of `total`: once, when enough was measured; None otherwise."""
        now = self._clock()
        if self._first is None:
            self._first = now, step
        then, first = self._first
        if self._over or now - then < _MEASURED_S or step - first < _MEASURED_STEPS:
            return None
        self._over = True
        each, steps = (now - then) / (step - first), total - step
        if each * steps < LONG_S or steps > _ENDLESS:
            return None
        whole, step_time = format_duration(each * steps), format_duration(each, precise=True)
        return (
            f"about {whole} for the {steps:,} remaining steps, at {step_time} each; "
            "Ctrl-C saves and stops, the same command continues; --max_steps or --num_epochs sets the length"
        )
