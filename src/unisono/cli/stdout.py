"""Detects that standard output cannot be written, because the disk is full or a pipe's reader has exited."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class Output:
    """Wraps a stream and records its failure, so that callers can distinguish it from other OSErrors."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        """Writes to the stream."""
        with self._remembering_failure():
            return int(self._stream.write(text))

    def flush(self) -> None:
        """Flushes the stream."""
        with self._remembering_failure():
            self._stream.flush()

    def discard_rest(self) -> None:
        """Redirects the stream to /dev/null; otherwise Python would report the failure again when it exits."""
        with suppress(OSError, ValueError, AttributeError):
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self._stream.fileno())
            os.close(devnull)

    @contextmanager
    def _remembering_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def watched_stdout() -> Iterator[Output | None]:
    """Replaces sys.stdout with an Output; yields None if stdout was closed before Python started."""
    original = sys.stdout
    if original is None:
        yield None
        return
    output: Any = Output(original)
    sys.stdout = output
    try:
        yield output
    finally:
        sys.stdout = original
