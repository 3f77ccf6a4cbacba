"""The length of a run, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.config.resolve import Resolved
from unisono.data.order import Strides
from unisono.engine.state import TrainState
from unisono.settings import Settings

if TYPE_CHECKING:
    from unisono.observe.profile.read import Profile
    from unisono.observe.report.metrics_table import MetricsTable

BY_LENGTH = "length"
"""The source, in run.json, of a setting whose value is derived from the length of the run."""


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    folder: Path
    status: str  # "done", or "stopped" by a signal, in which case the same command continues the run
    step: int
    last: dict[str, Any]
    """The last loss, learning rate and gradient norm, and the metrics of the last evaluation."""

    @cached_property
    def metrics(self) -> MetricsTable:
        """All logged steps and evaluations as a table with `columns`, `rows`, `len()` and `to_pandas()`."""
        from unisono.observe.report.metrics_table import MetricsTable  # imported when used, to start quickly

        return MetricsTable.read(self.folder)

    @cached_property
    def profile(self) -> Profile | None:
        """The newest profile of the run, whose tables `print()` shows; None if nothing was profiled."""
        from unisono.observe.profile.read import newest_profile

        return newest_profile(self.folder)

    def plot(self, *names: str) -> Any:
        """Returns a matplotlib figure of these metrics; without names, of the loss and the evaluation metrics."""
        from unisono.observe.report.plot import plot

        return plot(self.metrics, names, self.folder.name)


@dataclass(frozen=True)
class Length:
    """The length of a run from its beginning, in samples and in optimizer steps."""

    samples: int
    steps: int

    @classmethod
    def of(cls, settings: Settings, num_samples: int, state: TrainState, *, whole_epochs: bool = False) -> Length:
        """Returns the length that max_steps or num_epochs sets, whichever ends the run first.

        Counts steps from the current state, because the last batch before an extended run's former end may be smaller.
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

    def remarks(self, settings: Settings, done: int, explicit: Callable[[str], bool] = lambda name: True) -> list[str]:
        """Returns notes on settings that have no effect with this length, for a run that has done `done` steps.

        `explicit(name)` tells whether the user has set the setting.
        """
        warmup, run = settings.optim.warmup_steps, settings.run
        if done and done >= self.steps:
            limits = f"max_steps is {run.max_steps}, num_epochs {run.num_epochs}"
            return [f"all steps of this run are done ({limits}); raise one of them to continue training"]
        remarks = []
        if run.max_steps is not None and self.steps < run.max_steps and explicit("max_steps"):
            remarks.append(
                f"max_steps {run.max_steps} is not reached: num_epochs {run.num_epochs} ends after {self.steps} steps"
            )
        if warmup > self.steps and run.max_steps is None and run.num_epochs is None:
            remarks.append(
                f"the run has {self.steps} steps, one epoch, and warmup_steps is {warmup}: it never reaches its "
                "learning rate; set the length with --max_steps or --num_epochs"
            )
        elif warmup > self.steps:
            remarks.append(
                f"warmup_steps {warmup}: the run has {self.steps} steps and never reaches its learning rate; use "
                f"--warmup_steps {self.steps // 10}"
            )
        return remarks


def fit_warmup(resolved: Resolved, steps: int, *, whole_epochs: bool) -> tuple[Resolved, list[str]]:
    """Shortens a default warm-up to a tenth of the run, with a note; a value that the user set is not changed.

    If `whole_epochs` is set, the user's own loop decides the length of the run, and nothing is changed.
    """
    warmup, most = resolved.values["warmup_steps"], max(1, steps // 10)
    if whole_epochs or warmup <= most or resolved.sources["warmup_steps"] not in ("default", "recipe"):
        return resolved, []
    remark = f"warmup_steps {most}, a tenth of the run's {steps} steps; the default is {warmup}"
    return resolved.with_values(BY_LENGTH, warmup_steps=most), [remark]


def is_evaluated(state: TrainState, length: Length) -> bool:
    """Whether the evaluation of the current step is complete and need not be repeated.

    False for a run that resumes at its end, and for a run without a checkpoint, which starts at step 0: both repeat the
    evaluation.
    """
    return not state.owes_evaluation and state.step > 0 and state.samples < length.samples
