"""A clock that counts only the time in which its owner was running.

Ctrl-Z, SIGSTOP, a frozen container or a suspended job stops the watching process together with the ranks that it
watches. With an ordinary clock, the watcher would mistake its own pause for silence of the ranks and kill healthy ones.
"""

from __future__ import annotations

import time


class AwakeClock:
    """Counts seconds without the pauses of its owner, which must call `advance` regularly."""

    def __init__(self) -> None:
        self.now = 0.0
        self._last = time.monotonic()

    def advance(self, expected_s: float) -> float:
        """Adds the time since the last call and returns the total.

        `expected_s` is the longest time between two calls while the owner is running. A much longer gap (more than
        twice as long plus a second, to allow for a busy machine) is a pause and counts as `expected_s`.
        """
        moment = time.monotonic()
        gap, self._last = moment - self._last, moment
        self.now += gap if gap <= 2 * expected_s + 1.0 else expected_s
        return self.now
