"""Handles unusable rows: the first one raises an error; with --leave_out_bad, all are skipped and counted."""

from __future__ import annotations

from collections.abc import Callable

from unisono.errors import ConfigError
from unisono.formatting import format_count
from unisono.recipes.common.bad_files import first_few
from unisono.recipes.common.tree import one_line

Remark = Callable[[str], None]
"""A function that prints a line for the user."""

_NUM_EXAMPLES = 4  # one more than a message lists, so that it can end with "and others"


def no_remark(text: str) -> None:
    """Discards the line."""


class BadRows:
    """Collects the unusable rows of a file, or raises ConfigError at the first one."""

    def __init__(self, leave_out: bool) -> None:
        self._leave_out = leave_out
        self.number = 0
        self._examples: list[str] = []

    def add(self, where: str, problem: str, number: int = 1) -> None:
        """Adds one unusable row, or several with the same problem; raises ConfigError unless they may be skipped."""
        message = one_line(f"{where}: {problem}")
        if not self._leave_out:
            raise ConfigError(f"{message}; correct it, or pass --leave_out_bad to skip such rows")
        self.number += number
        if len(self._examples) < _NUM_EXAMPLES:
            self._examples.append(message)

    def report(self, remark: Remark, num_usable: int, kind: str, source: object) -> None:
        """Reports the skipped rows (`kind` is singular); raises ConfigError if no row is usable."""
        if not num_usable:
            reason = f" ({first_few(self._examples)})" if self._examples else ""
            raise ConfigError(f"{source} has no usable {kind}{reason}")
        if self.number:
            skipped = f"skipped {format_count(self.number, 'unusable row')} of {source}"
            remark(f"{skipped} ({format_count(num_usable, kind)} left): {first_few(self._examples)}")
