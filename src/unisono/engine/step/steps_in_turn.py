"""The optimizer steps of groups of weights that are trained in turn.

Each group has its own `OptimizerStep`, with its own names of sums, expected count, guarded shapes, optimizer and
average. The numbers of a step are read one step later, which settles the step; by then the run may train another group.
So the objects share a reference to the step that is not settled yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from unisono.cluster.agree import Agreement
from unisono.cluster.hangs.heartbeat import Heartbeat
from unisono.data.loader import MicroBatch
from unisono.engine.state import GroupState
from unisono.engine.step.accumulate import flop_meter
from unisono.engine.step.components import Components, TrainedGroup
from unisono.engine.step.flops import FlopMeter
from unisono.engine.step.learning_rate import learning_rate_factor
from unisono.engine.step.optimizer_step import OptimizerStep, StepOutcome, StepReport
from unisono.settings import Settings


class StepsInTurn:
    """Runs the optimizer steps of a run: of all its weights, or of its groups of weights in turn."""

    def __init__(self, components: Components, settings: Settings, agreement: Agreement, heartbeat: Heartbeat) -> None:
        self._components, self._optim = components, settings.optim
        self.flops = flop_meter(components.recipe, components.strategy.placement, settings)
        """Counts the operations of this rank's steps."""
        self._steps: list[_StepOfGroup] = []
        for group in components.groups:
            self._steps.append(_StepOfGroup(self, components, settings, agreement, heartbeat, group, self.flops))
        self._last: _StepOfGroup | None = None  # the step that may not be settled yet

    def run(
        self,
        group: TrainedGroup,
        micro_batches: Iterator[MicroBatch],
        total_steps: int,
        samples: int,
        requests: Mapping[str, float],
    ) -> StepOutcome:
        """Consumes one step's micro-batches and updates the weights of a group; see OptimizerStep.run.

        `total_steps` is the length of the run, on which the learning rate depends.
        """
        step, rate = self._steps[group.number], self._set_learning_rate(group, total_steps)
        outcome = step.run(micro_batches, rate, samples, requests)
        self._last = step
        return outcome

    def _set_learning_rate(self, group: TrainedGroup, total_steps: int) -> float:
        """Sets the learning rate of a group, whose schedule counts its own steps."""
        rhythm = self._components.rhythm
        step, steps = (rhythm.own_steps(group.number, each) for each in (self._components.state.step, total_steps))
        if (own := self._components.recipe.learning_rate(step)) is not None:
            return group.optimizer.set_own_learning_rate(own)
        return group.optimizer.set_learning_rate(learning_rate_factor(step, steps, group.optim(self._optim)))

    def settle(self) -> StepReport | None:
        """Settles the last step, if it is not settled yet; see OptimizerStep.settle."""
        return None if self._last is None else self._last.settle()

    def try_out(self, group: TrainedGroup, micro_batches: Iterator[MicroBatch]) -> None:
        """Runs forward and backward of micro-batches to see whether they fit into memory; changes nothing."""
        self._steps[group.number].try_out(micro_batches)

    @property
    def measured(self) -> list[str] | None:
        """The names of the metrics of loss(), with the group's prefix; None until each group has had a step."""
        if not all(step.has_names for step in self._steps):
            return None
        if not self._components.groups[0].prefix:
            return ["loss", *self._steps[0].measured]
        pairs = zip(self._components.groups, self._steps, strict=True)
        return [group.prefix + name for group, step in pairs for name in ("loss", *step.measured)]

    def counts_remark(self, *, ended: bool = False) -> str | None:
        """Returns a warning if the counts that loss() returns look wrong; returned only once for each group."""
        remarks = (step.counts_remark(ended=ended) for step in self._steps)
        return next((remark for remark in remarks if remark is not None), None)


class _StepOfGroup(OptimizerStep):
    """The steps of one group."""

    def __init__(
        self,
        steps: StepsInTurn,
        components: Components,
        settings: Settings,
        agreement: Agreement,
        heartbeat: Heartbeat,
        group: TrainedGroup,
        flops: FlopMeter,
    ) -> None:
        super().__init__(components, settings, agreement, heartbeat, group, flops)
        self._all, self._groups = steps, components.groups

    def settle_previous(self) -> StepReport | None:
        """Settles the previous step, of whichever group."""
        return self._all.settle()

    def settle(self) -> StepReport | None:
        """Settles this group's last step; if there are groups, the report has the newest metrics of all of them."""
        report = super().settle()
        if report is None or not isinstance(self._own, GroupState):
            return report
        newest = {"loss": report.loss, "lr": report.learning_rate, "grad_norm": report.grad_norm, **report.metrics}
        self._own.latest = {name: value for name, value in newest.items() if math.isfinite(value)}
        metrics: dict[str, float] = {}
        for group in self._groups:
            assert isinstance(group.state, GroupState)
            values = newest if group is self._group else group.state.latest
            metrics |= {group.prefix + name: value for name, value in values.items()}
        return replace(report, metrics=metrics)
