"""The current step of a run, for losses that change during training (annealing, curricula)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from unisono.errors import ConfigError


class Clock:
    """The number of the step being computed; the same on every rank and in every micro-batch.

    A step that is repeated after running out of memory, recomputed in the backward pass, or computed after a resume
    reads the same numbers.
    """

    def __init__(self) -> None:
        self._step, self._steps = 0, 0
        self._recorded = False

    @property
    def step(self) -> int:
        """Number of optimizer steps before the current one: 0 in the first step."""
        self._check()
        return self._step

    @property
    def progress(self) -> float:
        """Fraction of the run that is done, from 0 to 1; it depends on the length of the run."""
        self._check()
        return min(1.0, self._step / self._steps) if self._steps else 0.0

    def set(self, step: int, steps: int) -> None:
        """Sets the current step and the length of the run; called by the engine."""
        self._step, self._steps = step, steps

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """A context in which reading the clock raises an error: a CUDA graph would replay the current value forever."""
        self._recorded = True
        try:
            yield
        finally:
            self._recorded = False

    def _check(self) -> None:
        if self._recorded:
            raise ConfigError(
                "cuda_graph: loss() reads the clock, and a recorded step would keep the first value; remove "
                "--cuda_graph"
            )
