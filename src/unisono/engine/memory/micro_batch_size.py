"""Chooses the micro-batch size: as large as memory allows. The size has no effect on the result.

All ranks halve the size together when one of them runs out of memory. It grows only with `--micro_batch auto`: before
the first step by trying sizes, and later by doubling, which is retried less often after each failure. If only a restart
helps, the next attempt reads a smaller size from the run folder's `memory.json`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from unisono.engine.batch import BatchPlan
from unisono.engine.state import TrainState
from unisono.engine.step.out_of_memory import OutOfMemoryTogether
from unisono.errors import UserError
from unisono.observe.note import leave_note
from unisono.plain_files import NotRegular, read_json

_FILE = "memory.json"
_STEPS_BEFORE_RISING = 200
_REFINEMENTS = 3  # number of trials between the largest size that fits and the smallest that does not


class MicroBatchSizer:
    """Chooses the micro-batch size of a run, the same on every rank."""

    def __init__(self, plan: BatchPlan, state: TrainState, run_folder: Path, *, may_rise: bool, largest: int) -> None:
        self.plan, self._state, self._folder = plan, state, run_folder
        self._may_rise, self._largest = may_rise, min(largest, plan.share)
        self._first = plan.micro_batch
        if may_rise and plan.micro_batch < min(state.micro_batch, plan.share):
            # The previous attempt ran out of memory after the checkpoint, so this one starts with a smaller size.
            state.memory_failures += 1
            self._take(plan.micro_batch)

    def shrink(self, tried: int) -> bool:
        """Halves the size after a micro-batch of `tried` samples did not fit; returns False if `tried` is 1."""
        size = smaller(self.plan.micro_batch, tried)
        if size is None:
            return False
        self._state.memory_failures += 1
        self._take(size)
        return True

    def leave_for_next_attempt(self, tried: int) -> int | None:
        """Halves the size for the next attempt, and returns it; None if a single sample did not fit."""
        size = smaller(self.plan.micro_batch, tried)
        if size is not None:
            store_size(self._folder, size)
        return size

    def is_new_to_next_attempt(self, size: int) -> bool:
        """Whether the next attempt will begin with `size`, and this attempt began with a larger size.

        False if `size` could not be stored. Also false if this attempt began with a size that fits, raised it, and then
        failed: the next attempt would do the same.
        """
        return size < self._first and stored_size(self._folder) == size

    def rise(self) -> bool:
        """Doubles the size if the settings allow it and the last change was long enough ago; returns whether it did."""
        wait = _STEPS_BEFORE_RISING * 2**self._state.memory_failures
        if not self._may_rise or self.plan.micro_batch >= self._largest:
            return False
        if self._state.step - self._state.memory_step < wait:
            return False
        self._take(min(2 * self.plan.micro_batch, self._largest))
        return True

    def find(self, try_out: Callable[[BatchPlan], None]) -> int:
        """Sets the largest size that fits, or 1 if none does; returns the number of trials."""
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

    def fit(self, try_out: Callable[[BatchPlan], None]) -> bool:
        """Tries the size and halves it until it fits or reaches one sample; returns whether the size has changed."""
        before = self.plan.micro_batch
        while self.plan.micro_batch > 1:
            try:
                try_out(self.plan)
                break
            except OutOfMemoryTogether:
                self.shrink(self.plan.share)
        return self.plan.micro_batch < before

    def _take(self, size: int) -> None:
        self.plan = replace(self.plan, micro_batch=size)
        self._state.micro_batch, self._state.memory_step = size, self._state.step


def smaller(micro_batch: int, share: int) -> int | None:
    """Returns the next size to try after min(micro_batch, share) samples did not fit; None after a single sample."""
    tried = min(micro_batch, share)
    return None if tried <= 1 else -(-tried // 2)


def store_size(run_folder: Path, micro_batch: int) -> None:
    """Stores the size that the next attempt should use."""
    leave_note(run_folder / _FILE, {"micro_batch": micro_batch})


def stored_size(run_folder: Path) -> int | None:
    """Returns the size that the previous attempt stored; None if there is none."""
    try:
        size = read_json(run_folder / _FILE)["micro_batch"]
    except NotRegular as error:  # stop here, because writing would replace this file
        raise UserError(f"{run_folder / _FILE} cannot be read ({error.strerror}); remove it") from None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return size if isinstance(size, int) and size >= 1 else None
