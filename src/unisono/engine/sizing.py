"""How many samples a device computes at once: what memory allows, never what the result depends on.

It falls by half when memory runs out, on all ranks together. It rises only where the user asked for it (`--micro_batch
auto`): before the first step, by trying sizes out, and later by doubling, the more seldom the more often that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from unisono.engine.batch import BatchPlan
from unisono.engine.memory import OutOfMemoryTogether, remember, smaller
from unisono.engine.state import TrainState

_STEPS_BEFORE_RISING = 200
_REFINEMENTS = 3  # trials between the largest size that fitted and the smallest that did not


class Sizing:
    """The micro-batch of a run, on every rank the same."""

    def __init__(self, plan: BatchPlan, state: TrainState, run_folder: Path, *, may_rise: bool, largest: int) -> None:
        self.plan, self._state, self._folder = plan, state, run_folder
        self._may_rise, self._largest = may_rise, min(largest, plan.share)
        if may_rise and plan.micro_batch < min(state.micro_batch, plan.share):
            # The attempt before this one ran out of memory after the checkpoint: not the same size again at once.
            state.memory_failures += 1
            self._take(plan.micro_batch)

    def shrink(self, tried: int) -> bool:
        """After it ran out of memory with `tried` samples at once: half of that from now on. False if it was one."""
        size = smaller(self.plan.micro_batch, tried)
        if size is None:
            return False
        self._state.memory_failures += 1
        self._take(size)
        return True

    def leave_for_next_attempt(self, tried: int) -> int | None:
        """The same for the attempt after this one; the size it will have, None if there is none to try."""
        size = smaller(self.plan.micro_batch, tried)
        if size is not None:
            remember(self._folder, size)
        return size

    def rise(self) -> bool:
        """Doubles it if that was asked for and it is time to try."""
        wait = _STEPS_BEFORE_RISING * 2**self._state.memory_failures
        if not self._may_rise or self.plan.micro_batch >= self._largest:
            return False
        if self._state.step - self._state.memory_step < wait:
            return False
        self._take(min(2 * self.plan.micro_batch, self._largest))
        return True

    def find(self, try_out: Callable[[BatchPlan], None]) -> int:
        """Takes the largest micro-batch that fits, or one sample if none does; returns how many trials that took."""
        good, bad, trials = 0, self._largest + 1, 0
        size = 1
        while good + 1 < bad and trials < _REFINEMENTS + self._largest.bit_length() + 1:
            trials += 1
            try:
                try_out(replace(self.plan, micro_batch=size))
                good = size
            except OutOfMemoryTogether:
                bad = size
            refining = bad <= self._largest
            size = (good + bad) // 2 if refining else min(2 * size, self._largest)
            if refining and bad - good <= max(1, good // 8):
                break
        self._take(max(good, 1))
        return trials

    def _take(self, size: int) -> None:
        self.plan = replace(self.plan, micro_batch=size)
        self._state.micro_batch, self._state.memory_step = size, self._state.step
