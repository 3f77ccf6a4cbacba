"""How far long work has come: a live bar on a terminal, a line now and then in a log file or pipe.

    with progress("encoding videos", len(videos)) as advance:
        for video in videos:
            encode(video)
            advance()                      # one more; advance(3): three more; advance.to(17): 17 in all

`total=None` shows the elapsed time, for work whose amount nobody knows. In a recipe's `prepare()`, call
`work.progress(...)` with the same arguments: only the main rank prints. `advance` may be called from any thread, and
`advance.message(text)` prints a line above the bar, as `print_line` and `work.message` do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle
from threading import Event, Lock, Thread
from typing import Any

from unisono.formatting import format_duration, format_rate
from unisono.observe.status_line import StatusLine, print_line, status_line

FIRST_LINE_S, SLOWEST_LINES_S = 5.0, 60.0
"""Where no terminal is: lines after 5, 10, 20, 40 seconds more each, then one per minute."""
_DRAW_S = 0.2
_SPINNER = "|/-\\"


@contextmanager
def progress(
    what: str,
    total: int | None = None,
    unit: str = "",
    *,
    of: int | None = None,
    enabled: bool = True,
    say: Callable[[str], None] | None = None,
) -> Iterator[Advance]:
    """Shows how far the work in the `with` block is; yields what to call when more of it is done.

    `of` is the amount over all ranks where `total` is this rank's share. `enabled=False` (other ranks than the main
    one) and a total of 0 show nothing. `say` receives plain lines instead of this process's stderr.
    """
    advance = Advance(what, total, unit, of, say)
    if not enabled or total == 0:
        yield advance
        return
    advance._begin()
    try:
        yield advance
    except BaseException:
        advance._stop()
        raise
    advance._end()


def unseen(what: str, total: int | None = None, unit: str = "", **rest: Any) -> AbstractContextManager[Advance]:
    """A progress that shows nothing: the default of a function that takes one."""
    return progress(what, total, unit, enabled=False)


class Advance:
    """Counts what is done. Call it when more is."""

    def __init__(
        self, what: str, total: int | None, unit: str, of: int | None, say: Callable[[str], None] | None
    ) -> None:
        self.total = total
        """May be set later, when the amount becomes known."""
        self._what, self._unit, self._of = what, f" {unit}" if unit else "", of
        self.message: Callable[[str], None] = say or print_line
        self._line: StatusLine | None = None if say else status_line()
        self._done, self._note = 0.0, ""
        self._started = time.monotonic()
        # (time, done) about once a second: the rate of the last while, so that a pause is forgotten.
        self._marks: deque[tuple[float, float]] = deque([(self._started, 0.0)], maxlen=60)
        self._lock, self._over = Lock(), Event()
        self._thread: Thread | None = None

    def __call__(self, amount: float = 1, note: str = "") -> None:
        """`amount` more is done; `note` (a loss, a file name) is shown behind the numbers."""
        with self._lock:
            self._set(self._done + amount, note)

    def to(self, done: float, note: str = "") -> None:
        """`done` of the total is done."""
        with self._lock:
            self._set(done, note)

    def _set(self, done: float, note: str) -> None:
        self._done, self._note = done, note or self._note
        now = time.monotonic()
        if now - self._marks[-1][0] >= 1.0:
            self._marks.append((now, done))

    def _begin(self) -> None:
        if self._line is None or not self._line.live:
            here = f", {self.total:,} of them on this rank" if self._of is not None and self._of != self.total else ""
            amount = "" if self.total is None else f": {self._of or self.total:,}{self._unit}{here}"
            self.message(f"{self._what}{amount}")
        self._thread = Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Draws also while nothing advances: a long item must not look like a hang."""
        pause, spinner = FIRST_LINE_S, cycle(_SPINNER)
        while True:
            live = self._line is not None and self._line.live
            if live:
                self._draw(next(spinner))
            if self._over.wait(_DRAW_S if live else pause):
                return
            if not live:
                pause = min(2 * pause, SLOWEST_LINES_S)
                self.message(f"{self._what}: {', '.join(self._fields(' of '))}")

    def _draw(self, spinner: str) -> None:
        assert self._line is not None
        if self.total is None:
            self._line.show([f"{spinner} {self._what}", *self._fields("/")])
        else:
            share = [f"this rank's share of {self._of:,}{self._unit}"] if self._of not in (None, self.total) else []
            self._line.show([self._what, *self._fields("/"), *share], min(1.0, self._done / max(1, self.total)))

    def _fields(self, of: str) -> list[str]:
        done, total, (then, before) = self._done, self.total, self._marks[0]
        took, now = time.monotonic() - self._started, time.monotonic()
        rate = (done - before) / (now - then) if done > before and now > then else 0.0
        speed = [f"{format_rate(rate)}{self._unit}/s"] if rate else []
        note = [self._note] if self._note else []
        if total is None:
            count = [f"{done:,.0f}{self._unit}", *speed] if done else []
            return [*count, f"{format_duration(took)} so far", *note]
        left = (
            [f"{format_duration((total - done) / rate)} left"]
            if rate and done <= total
            else [f"{format_duration(took)} so far"]
        )
        return [f"{done:,.0f}{of}{total:,}{self._unit}", *left, *speed, *note]

    def _end(self) -> None:
        self._stop()
        took, total = format_duration(time.monotonic() - self._started), self.total
        if total is None:
            self.message(f"{self._what}: {f'{self._done:,.0f}{self._unit} in ' if self._done else ''}{took}")
        else:
            whole = f" of {total:,}" if self._done < total else ""
            self.message(f"{self._what}: {self._done:,.0f}{whole}{self._unit} in {took}")

    def _stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._line is not None:
            self._line.clear()
