"""Shows the progress of long work: with a live bar on a terminal, or with an occasional line in a log file or pipe.

    with progress("encoding videos", len(videos)) as advance:
        for video in videos:
            encode(video)
            advance()                      # adds 1; advance(3) adds 3; advance.to(17) sets the count to 17

With `total=None` it shows the elapsed time. In a recipe's `prepare()`, call `work.progress(...)` with the same
arguments; only rank 0 prints. Any thread may call `advance`. `advance.message(text)` prints a line above the bar, as
`print_line` and `work.message` do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from threading import Event, Lock, Thread

from unisono.formatting import format_duration, format_rate
from unisono.observe.status_line import StatusLine, print_line, status_line

FIRST_LINE_S, SLOWEST_LINES_S = 5.0, 60.0
"""Without a terminal, the first line is printed after 5 s. The pause then doubles up to 60 s."""
_DRAW_S = 0.2
_SPINNER = "|/-\\"


@contextmanager
def progress(
    title: str,
    total: int | None = None,
    unit: str = "",
    *,
    of: int | None = None,
    enabled: bool = True,
    sink: Callable[[str], None] | None = None,
) -> Iterator[Advance]:
    """Shows the progress of the work in the `with` block; yields an `Advance` to call whenever work is completed.

    `total` is the amount of work, counted in `unit`; None if it is unknown. If it is only this rank's share, `of` is
    the amount over all ranks. Nothing is shown with `enabled=False` (on ranks other than 0) or a total of 0. If `sink`
    is set, plain lines go to that function instead of stderr.
    """
    advance = Advance(title, total, unit, of, sink)
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


class Advance:
    """Counts the completed work. Call it whenever work is completed."""

    def __init__(
        self, title: str, total: int | None, unit: str, of: int | None, sink: Callable[[str], None] | None
    ) -> None:
        self.total = total
        """Total amount of work. It may be set later, when it is known."""
        self._title, self._unit, self._of = title, f" {unit}" if unit else "", of
        self.message: Callable[[str], None] = sink or print_line
        self._line: StatusLine | None = None if sink else status_line()
        self._done, self._note = 0.0, ""
        self._started = time.monotonic()
        # (time, done) pairs, about one per second for the last minute, from which the rate is computed.
        self._history: deque[tuple[float, float]] = deque([(self._started, 0.0)], maxlen=60)
        self._lock, self._over = Lock(), Event()
        self._thread: Thread | None = None

    def __call__(self, amount: float = 1, note: str = "") -> None:
        """Adds `amount` to the completed work. `note` (a loss, a file name) is shown after the numbers."""
        with self._lock:
            self._set(self._done + amount, note)

    def to(self, done: float, note: str = "") -> None:
        """Sets the completed amount of work to `done`. `note` is shown after the numbers."""
        with self._lock:
            self._set(done, note)

    def _set(self, done: float, note: str) -> None:
        self._done, self._note = done, note or self._note
        now = time.monotonic()
        if now - self._history[-1][0] >= 1.0:
            self._history.append((now, done))

    def _begin(self) -> None:
        if self._line is None or not self._line.live:
            here = f", {self.total:,} of them on this rank" if self._of is not None and self._of != self.total else ""
            amount = "" if self.total is None else f": {self._of or self.total:,}{self._unit}{here}"
            self.message(f"{self._title}{amount}")
        self._thread = Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Redraws the line regularly, so that a long piece of work does not look like a hang."""
        pause, spinner = FIRST_LINE_S, cycle(_SPINNER)
        while True:
            live = self._line is not None and self._line.live
            if live:
                self._draw(next(spinner))
            if self._over.wait(_DRAW_S if live else pause):
                return
            if not live:
                pause = min(2 * pause, SLOWEST_LINES_S)
                self.message(f"{self._title}: {', '.join(self._fields(' of '))}")

    def _draw(self, spinner: str) -> None:
        assert self._line is not None
        if self.total is None:
            self._line.show([f"{spinner} {self._title}", *self._fields("/")])
        else:
            share = [f"this rank's share of {self._of:,}{self._unit}"] if self._of not in (None, self.total) else []
            self._line.show([self._title, *self._fields("/"), *share], min(1.0, self._done / max(1, self.total)))

    def _fields(self, of: str) -> list[str]:
        done, total, (then, before) = self._done, self.total, self._history[0]
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
            self.message(f"{self._title}: {f'{self._done:,.0f}{self._unit} in ' if self._done else ''}{took}")
        else:
            whole = f" of {total:,}" if self._done < total else ""
            self.message(f"{self._title}: {self._done:,.0f}{whole}{self._unit} in {took}")

    def _stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._line is not None:
            self._line.clear()
