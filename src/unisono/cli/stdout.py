"""Standard output of a command, which may be full or closed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class Output:
    """A stream that remembers whether it could be written: an OSError may also come from elsewhere."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        """Writes to the stream, and remembers a failure."""
        try:
            return int(self._stream.write(text))
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        """Flushes the stream, and remembers a failure."""
        try:
            self._stream.flush()
        except OSError as error:
            self.failure = error
            raise

    def give_up(self) -> None:
        """Discards all further output; otherwise python would report the failure again when it exits."""
        with suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def watched_stdout() -> Iterator[Output | None]:
    """Replaces sys.stdout with an Output; yields None if stdout was closed before python started."""
    before = sys.stdout
    if before is None:
        yield None
        return
    output: Any = Output(before)
    sys.stdout = output
    try:
        yield output
    finally:
        sys.stdout = before
