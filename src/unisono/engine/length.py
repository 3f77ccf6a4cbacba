"""How long a run is, and what it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.data.order import Strides
from unisono.engine.state import TrainState
from unisono.settings import Settings


@dataclass(frozen=True)
class Result:
    """What a run left behind."""

    folder: Path
    status: str  # "done", or "stopped" by a signal: run again to go on
    step: int
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Length:
    """How long a run is, from its beginning, in samples and in optimizer steps."""

    samples: int
    steps: int

    @classmethod
    def of(cls, settings: Settings, num_samples: int, state: TrainState, *, whole_epochs: bool = False) -> Length:
        """The end that comes first: max_steps, or the last sample of the last epoch.

        Counted from where the run stands: one that had ended with a smaller last batch may have been extended.
        """
        strides = Strides(state.global_batch, num_samples if whole_epochs else None)
        epochs = settings.run.num_epochs
        if epochs is None and settings.run.max_steps is None:
            epochs = 1
        max_steps = settings.run.max_steps
        by_steps = None if max_steps is None else strides.after(state.samples, max_steps - state.step)
        by_epochs = None if epochs is None else epochs * num_samples
        samples = min(end for end in (by_steps, by_epochs) if end is not None)
        return cls(samples, state.step + strides.between(state.samples, samples))

    def remarks(self, settings: Settings, done: int) -> list[str]:
        """What a run of this length will not do, after so many steps."""
        warmup, run = settings.optim.warmup_steps, settings.run
        if done and done >= self.steps:
            told = f"max_steps is {run.max_steps}, num_epochs {run.num_epochs}"
            return [f"all steps of this run are done ({told}); a larger one of them goes on with it"]
        found = []
        if run.max_steps is not None and self.steps < run.max_steps:
            found.append(f"max_steps {run.max_steps} is not reached: num_epochs {run.num_epochs} is {self.steps} steps")
        if warmup > self.steps and run.max_steps is None and run.num_epochs is None:
            found.append(
                f"the run has {self.steps} steps, one epoch, and warmup_steps is {warmup}: it never reaches its "
                "learning rate; say how long to train, by --max_steps or --num_epochs"
            )
        elif warmup > self.steps:
            found.append(
                f"warmup_steps {warmup}: the run has {self.steps} steps and never reaches its learning rate; use "
                f"--warmup_steps {self.steps // 10}"
            )
        return found
