"""Redraws the last line of a terminal in place, and prints log lines above it.

This module never hides the cursor, moves it up or redirects a stream, so the terminal stays usable even after a kill.
Without a terminal there is no status line, and log lines are printed as plain text.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from threading import RLock
from typing import TextIO

from unisono.typed_paths import as_typed

_BAR_LEAST, _BAR_MOST = 10, 30
_CLEAR = "\r\x1b[K"


class StatusLine:
    """The status line of one stream. If the terminal is closed, nothing more is printed and the run continues."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.live = _is_terminal(stream)
        self._shown = ""
        self._lock = RLock()  # needed because a progress bar draws in its own thread

    def show(self, fields: Sequence[str], fraction: float | None = None) -> None:
        """Draws the fields, the most important ones first. A narrow terminal shows fewer. `fraction` adds a bar."""
        if not self.live:
            return
        kept, width = list(fields), self._width() - 1  # text in the last column would wrap
        bar = fraction is not None and width >= 2 * _BAR_LEAST + len(kept[0])
        room = width - (_BAR_LEAST + 2 if bar else 0)
        while len(kept) > 1 and len("  ".join(kept)) > room:
            kept.pop()
        if bar and fraction is not None:
            cells = min(_BAR_MOST, width - len("  ".join(kept)) - 2)
            kept.insert(1, self._bar(fraction, cells))
        with self._lock:
            self._shown = "  ".join(kept)[:width]
            self._write(f"\r{self._shown}\x1b[K")

    def print(self, text: str) -> None:
        """Prints a line, above the status line if one is shown."""
        text = as_typed(text)
        with self._lock:
            self._write(f"{_CLEAR}{text}\n{self._shown}" if self._shown else f"{text}\n")

    def clear(self) -> None:
        """Removes the status line."""
        with self._lock:
            if self._shown:
                self._shown = ""
                self._write(_CLEAR)

    def keep(self) -> None:
        """Turns the status line into an ordinary line."""
        with self._lock:
            if self._shown:
                self._shown = ""
                self._write("\n")

    def _bar(self, fraction: float, cells: int) -> str:
        full = round(cells * min(1.0, max(0.0, fraction)))
        try:
            "█░".encode(getattr(self.stream, "encoding", None) or "ascii")
        except (UnicodeError, LookupError):
            return "#" * full + "-" * (cells - full)
        return "█" * full + "░" * (cells - full)

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or 80 if self.stream else 80
        except (OSError, ValueError):
            return 80

    def _write(self, text: str) -> None:
        if self.stream is None:
            return
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):  # the terminal or the pipe is gone; the run continues
            self.live, self._shown = False, ""


def status_line() -> StatusLine:
    """Returns the status line of stderr. Bars and log lines share it, so that neither overwrites the other."""
    global _own
    if _own is None or _own.stream is not sys.stderr:
        _own = StatusLine(sys.stderr)
    return _own


def print_line(text: str) -> None:
    """Prints a line for the user on stderr, above the bar if one is shown. A closed stderr does not end the run."""
    status_line().print(text)


_own: StatusLine | None = None


def _forget() -> None:
    """Drops the status line in a forked process, because the parent draws it and may hold its lock in a thread."""
    global _own
    _own = None


os.register_at_fork(after_in_child=_forget)


def _is_terminal(stream: TextIO | None) -> bool:
    if os.environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False
