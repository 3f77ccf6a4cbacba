"""Shows the progress of training: a live bar with the newest metrics on a terminal, else a line per logged step."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any, TextIO

from unisono.formatting import format_duration, format_rate
from unisono.observe.status_line import StatusLine, status_line

SHOWN_ELSEWHERE = "UNISONO_SHOWN_ELSEWHERE"
"""Environment variable, set if something else (a notebook) shows the progress; no line is then printed per step."""
_DRAW_S = 0.1
_HISTORY_S = 1.0


class TrainingLine:
    """Shows the progress on stderr; with `enabled=False` (ranks other than 0) it does nothing."""

    def __init__(self, total_steps: int, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.total, self.until = total_steps, ""
        """The step up to which the time left is counted, and a note if the run continues after it ("in this epoch")."""
        self._line: StatusLine = status_line() if stream is None else StatusLine(stream)
        self._enabled = enabled
        self._numbers: dict[str, Any] = {}
        self._drawn_at = 0.0
        # (time, step) pairs, about one per second for the last half minute, from which the speed is computed.
        self._history: deque[tuple[float, int]] = deque(maxlen=30)

    def step(self, step: int) -> None:
        """Moves the bar on a terminal, whether or not the step is logged."""
        if self._enabled:
            self._record(step)
            self._draw_if_due()

    def update(self, *, step: int, **numbers: Any) -> None:
        """Shows the metrics of a step: loss, skipped steps, speed, lr, memory, GPU load and epoch; ignores others.

        On a terminal, a metric that is not passed keeps its last value.
        """
        if not self._enabled:
            return
        self._numbers.update(numbers)
        self._record(step)
        if self._line.live:
            self._draw_if_due()
        elif SHOWN_ELSEWHERE not in os.environ:
            self._line.print("  ".join(self._fields(time.monotonic())))

    @property
    def last_step(self) -> int:
        """The last step that was shown; 0 before the first one."""
        return int(self._numbers.get("step", 0))

    def message(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._enabled:
            self._line.print(text)

    def close(self) -> None:
        """Ends the line. The last numbers stay on the terminal."""
        if self._enabled and self._line.live and self._drawn_at:
            self._draw(time.monotonic())
            self._line.keep()
        self._drawn_at = 0.0

    def _record(self, step: int) -> None:
        now = time.monotonic()
        self._numbers["step"] = step
        if not self._history or now - self._history[-1][0] >= _HISTORY_S:
            self._history.append((now, step))

    def _draw_if_due(self) -> None:
        now = time.monotonic()
        if self._line.live and now - self._drawn_at >= _DRAW_S:
            self._draw(now)

    def _draw(self, now: float) -> None:
        self._drawn_at = now
        self._line.show(self._fields(now), self._numbers["step"] / max(1, self.total))

    def _fields(self, now: float) -> list[str]:
        """Returns the parts of the line, the most important ones first."""
        numbers = self._numbers
        shown = [f"step {numbers['step']}/{self.total}"]
        # Steps that train different groups of weights have different losses: show the newest loss of each group.
        of_groups = [name for name in numbers if name.endswith("/loss")] if numbers.get("group") else []
        for name in of_groups or ["loss"]:
            if (loss := numbers.get(name)) is not None:
                value = f"{loss:.4f}" if loss == 0 or 1e-3 <= abs(loss) < 1e5 else f"{loss:.3e}"
                shown.append(f"{name.removesuffix('/loss')} {value}")
        if skipped := numbers.get("skipped"):
            shown.append(f"{skipped} skipped")
        if (left := self._seconds_left(now)) is not None:
            shown.append(f"{format_duration(left)} left{f' {self.until}' if self.until else ''}")
        if (speed := numbers.get("samples_per_s")) is not None:
            shown.append(f"{format_rate(speed)} samples/s")
        if (mfu := numbers.get("mfu")) is not None:
            shown.append(f"MFU {mfu:.1%}")
        if (lr := numbers.get("lr")) is not None and not of_groups:
            shown.append(f"lr {lr:.1e}")
        if (memory := numbers.get("mem_gib")) is not None:
            shown.append(f"{memory:.1f} GiB")
        if (waited := numbers.get("comm_ms")) is not None and (step_ms := numbers.get("step_ms")):
            shown.append(f"{min(1.0, waited / step_ms):.0%} communication")
        if (load := numbers.get("gpu_util")) is not None:
            watts = numbers.get("gpu_power_w")
            shown.append(f"GPU {load:.0%}" + ("" if watts is None else f" {watts:.0f} W"))
        if (epoch := numbers.get("epoch")) is not None:
            shown.append(f"epoch {epoch:.2f}" if isinstance(epoch, float) else f"epoch {epoch}")
        return shown

    def _seconds_left(self, now: float) -> float | None:
        then, step_then = self._history[0]
        steps = self._numbers["step"] - step_then
        return (self.total - self._numbers["step"]) * (now - then) / steps if steps > 0 else None
