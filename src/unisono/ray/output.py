"""Merges the output of all machines of a run."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, defaultdict

_OWN = "unisono: "


class MergedOutput:
    """Prints lines of several machines. A message that every launcher prints, such as a restart, appears once."""

    def __init__(self) -> None:
        self._num_printed: Counter[str] = Counter()
        self._num_seen: defaultdict[int, Counter[str]] = defaultdict(Counter)  # machine -> how often each line occurred

    def write(self, machine: int, stream: str, line: str, *, is_main: bool) -> None:
        """Prints a line; `is_main`: it comes from the machine of rank 0, and is printed without a prefix."""
        if line.startswith(_OWN):
            self._num_seen[machine][line] += 1
            if self._num_seen[machine][line] <= self._num_printed[line]:
                return
            self._num_printed[line] += 1
        elif not is_main:
            line = f"[machine {machine}] {line}"
        with contextlib.suppress(OSError):  # the terminal may be closed
            print(line, file=sys.stdout if stream == "out" else sys.stderr, flush=True)
