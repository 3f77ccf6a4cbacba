"""One live line that says how the run is doing.

On a terminal the line is rewritten in place, a few times a second at most; in a log file or on a dumb terminal each
update is a line of its own. The line never stops the run: when the terminal goes away, it falls silent.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from typing import Any, TextIO

SECONDS_BETWEEN_DRAWS = 0.1
SECONDS_BETWEEN_MARKS = 1.0


class Progress:
    """The progress line on stderr; with `enabled=False` (ranks other than the main one) it does nothing."""

    def __init__(self, total_steps: int, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.total = total_steps
        self._stream = stream if stream is not None else sys.stderr
        self._enabled = enabled
        self._live = (
            enabled and self._stream is not None and self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        )
        self._numbers: dict[str, Any] = {}
        self._drawn_at = 0.0
        self._shown = ""
        # (time, step) about once a second: the speed of the last half minute, so that a pause is forgotten.
        self._marks: deque[tuple[float, int]] = deque(maxlen=30)

    def update(self, *, step: int, **numbers: Any) -> None:
        """Shows the numbers of a step: loss, lr, samples_per_s, mem_gib, epoch, skipped; others are passed over.

        On a terminal a number that is not given keeps its last value.
        """
        if not self._enabled:
            return
        now = time.monotonic()
        self._numbers.update(numbers, step=step)
        if not self._marks or now - self._marks[-1][0] >= SECONDS_BETWEEN_MARKS:
            self._marks.append((now, step))
        if not self._live:
            self._write("  ".join(self._fields(now)) + "\n")
        elif now - self._drawn_at >= SECONDS_BETWEEN_DRAWS:
            self._draw(now)

    def message(self, text: str) -> None:
        """Prints a line of its own above the live line."""
        if self._enabled:
            self._write(f"\r\x1b[K{text}\n{self._shown}" if self._shown else f"{text}\n")

    def close(self) -> None:
        """Leaves the last numbers standing and ends the line."""
        if self._live and self._shown:
            self._draw(time.monotonic())
            self._write("\n")
        self._live, self._shown = False, ""

    def _draw(self, now: float) -> None:
        fields, width = self._fields(now), self._width() - 1  # a full last column would wrap
        while len(fields) > 1 and len("  ".join(fields)) > width:
            fields.pop()
        self._shown = "  ".join(fields)[:width]
        self._drawn_at = now
        self._write(f"\r{self._shown}\x1b[K")

    def _fields(self, now: float) -> list[str]:
        """What is shown, the most important first: a narrow terminal shows fewer."""
        numbers = self._numbers
        shown = [f"step {numbers['step']}/{self.total}"]
        if (loss := numbers.get("loss")) is not None:
            shown.append(f"loss {loss:.4f}" if loss == 0 or 1e-3 <= abs(loss) < 1e5 else f"loss {loss:.3e}")
        if skipped := numbers.get("skipped"):
            shown.append(f"{skipped} skipped")
        if (lr := numbers.get("lr")) is not None:
            shown.append(f"lr {lr:.1e}")
        if (speed := numbers.get("samples_per_s")) is not None:
            shown.append(f"{speed:,.0f} samples/s" if speed >= 100 else f"{speed:.3g} samples/s")
        if (left := self._seconds_left(now)) is not None:
            shown.append(f"{duration(left)} left")
        if (memory := numbers.get("mem_gib")) is not None:
            shown.append(f"{memory:.1f} GiB")
        if (epoch := numbers.get("epoch")) is not None:
            shown.append(f"epoch {epoch:.2f}" if isinstance(epoch, float) else f"epoch {epoch}")
        return shown

    def _seconds_left(self, now: float) -> float | None:
        then, step_then = self._marks[0]
        steps = self._numbers["step"] - step_then
        return (self.total - self._numbers["step"]) * (now - then) / steps if steps > 0 else None

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError, AttributeError):  # the terminal or the pipe is gone; the run goes on
            self._enabled = self._live = False


def duration(seconds: float) -> str:
    """Seconds as people say them: 45s, 3m10s, 2h05m, 3d04h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
