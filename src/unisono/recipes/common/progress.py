"""How far long work is, in lines that say how long the rest will take."""

from __future__ import annotations

import time

from unisono.engine.recipe import Work

SAY_EVERY_S = 5.0
_WIDE = 20


class Progress:
    """Says how far this process is with its share; the others are as far."""

    def __init__(self, work: Work, what: str, mine: int, total: int) -> None:
        self._work, self._what, self._mine, self._total = work, what, mine, total
        self._done, self._took, self._last, self._begun = 0, 0.0, time.monotonic(), False

    def say(self) -> None:
        """Now and then; call it before each piece."""
        if not self._begun and self._mine:
            self._begun = True
            share = f", {self._mine:,} of them here" if self._mine < self._total else ""
            self._work.message(f"{self._what}: {self._total:,}{share}")
        elif self._done and time.monotonic() - self._last >= SAY_EVERY_S:
            self._last = time.monotonic()
            left = self._took / self._done * (self._mine - self._done)
            self._work.message(bar(self._done, self._mine, left))

    def done(self, pieces: int, seconds: float) -> None:
        """So many more, in so many seconds."""
        self._done += pieces
        self._took += seconds

    def end(self) -> None:
        """That was all."""
        if self._begun:
            self._work.message(f"  {self._done:,} in {clock(self._took)}")


def bar(done: int, total: int, left_s: float, unit: str = "") -> str:
    """A line with a bar: how much is done, and how long the rest will take."""
    full = round(_WIDE * done / total)
    return f"  {'█' * full + '·' * (_WIDE - full)} {done:,} of {total:,}{unit}, {clock(left_s)} left"


def clock(seconds: float) -> str:
    """A time in words."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
