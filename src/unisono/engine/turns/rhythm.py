"""Determines which group of weights a step trains, from the step number alone, so a run can resume at any step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Rhythm:
    """The steps that each group trains for, before the next group's turn; a recipe without groups has (1,)."""

    steps: Sequence[int] = (1,)

    @cached_property
    def cycle(self) -> int:
        """Number of steps after which the order repeats."""
        return sum(self.steps)

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.steps))

    def group_at(self, step: int) -> int:
        """Returns the number of the group that step `step` (from 0) trains."""
        position = step % self.cycle
        return next(number for number, end in enumerate(self._ends) if position < end)

    def own_steps(self, number: int, step: int) -> int:
        """Returns how many of the first `step` steps train this group."""
        cycles, position = divmod(step, self.cycle)
        own = self.steps[number]
        return cycles * own + min(max(position - self._ends[number] + own, 0), own)
