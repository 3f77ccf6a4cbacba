"""Rows that cannot be used: the first one stops the run, or all are left out and counted."""

from __future__ import annotations

from collections.abc import Callable

from unisono.errors import ConfigError
from unisono.formatting import format_count
from unisono.recipes.common.bad_files import few
from unisono.recipes.common.tree import one_line

_REMEMBERED = 4  # more than a message names, so that it can say that there are others


class BadRows:
    """What to do with rows that cannot be used."""

    def __init__(self, leave_out: bool) -> None:
        self._leave_out = leave_out
        self.number = 0
        self._first: list[str] = []

    def add(self, where: str, what: str, number: int = 1) -> None:
        """One more that cannot be used (or a number of them): ConfigError, or it is left out."""
        told = one_line(f"{where}: {what}")
        if not self._leave_out:
            raise ConfigError(f"{told}; mend it, or leave out all like it with --leave_out_bad")
        self.number += number
        if len(self._first) < _REMEMBERED:
            self._first.append(told)

    def tell(self, said: Callable[[str], None], kept: int, what: str, where: object) -> None:
        """Says what was left out (`what` in the singular); ConfigError where nothing else is there."""
        if not kept:
            why = f" ({few(self._first)})" if self._first else ""
            raise ConfigError(f"there is not one {what} of {where} that can be used{why}")
        if self.number:
            out = f"left out {format_count(self.number, 'row')} that cannot be used"
            said(f"{out}, {format_count(kept, what)} of {where} are there: {few(self._first)}")
