"""One optimizer step: computes the gradient of a global batch, normalises and clips it, and updates the weights.

The gradient of a step is  sum over all micro-batches and ranks of grad(total)  /  sum of their counts.  The counts are
known only after the last forward pass. So backward runs on  total / expected count,  and one factor corrects the
gradients after the ranks have summed them. Without this division, fp16 sums would overflow. The expected count is a
power of two, so the division is exact.

    factor = expected count x the strategy's divisor / true count / loss scale x clipping

There is no host-device sync here. The device decides whether a step was finite, through the fused optimizer's
`found_inf`, and the host reads the result one step later without waiting. The host updates the moving average
at that moment too, so a skipped step does not change it. The device restores buffers that a skipped step has changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.cluster.agree import Agreement
from unisono.cluster.hangs.heartbeat import Heartbeat
from unisono.data.loader import BadSample, MicroBatch
from unisono.engine.step.accumulate import GradientAccumulator
from unisono.engine.step.components import Components, TrainedGroup
from unisono.engine.step.coupled import CoupledGradientAccumulator
from unisono.engine.step.cuda_graph import GraphedFunction
from unisono.engine.step.device_timer import DeviceTimer, WaitTimer
from unisono.engine.step.flops import FlopMeter
from unisono.engine.step.out_of_memory import OutOfMemoryHere, in_one_line, is_out_of_memory
from unisono.engine.step.sums import metrics_in, per_item, power_of_two_near
from unisono.errors import TrainingFailed
from unisono.formatting import format_count
from unisono.parallel.strategy import unused_weights
from unisono.settings import Settings

_FIXED = ("total", "count", "norm", "found_inf", "scale")


@dataclass(frozen=True)
class StepReport:
    """The numbers of a step; the same on every rank, except for the rank's own time."""

    step: int
    group: str  # name of the group of weights that it trained; empty if the recipe has no groups
    samples: int  # samples consumed after this step
    loss: float
    count: float
    grad_norm: float
    skipped: bool
    learning_rate: float
    metrics: dict[str, float]
    own_seconds: float  # this rank's time until it first waited for the others
    comm_seconds: float  # time that this rank waited for the others without computing
    waited: bool  # this rank's GPU finished before the host had launched the next step

    @property
    def why_skipped(self) -> str:
        """The reason why the step was skipped, for a message."""
        if not 0 < self.count < math.inf:
            return f"loss() counted {self.count:g} items"
        return "non-finite loss or gradient"


@dataclass(frozen=True)
class StepOutcome:
    """The information that the host has after launching a step; the step's own numbers arrive one step later."""

    previous: StepReport | None  # the report of the previous step
    requests: Mapping[str, float]  # flags that any rank has set, such as a stop request
    bad: list[BadSample]  # samples of this step that any rank could not read


@dataclass
class _Unread:
    """The numbers of a step while they are copied from the device."""

    step: int
    own_step: int  # number of the group's steps before this step
    samples: int
    learning_rate: float
    names: list[str]
    own: DeviceTimer
    waits: WaitTimer
    numbers: Tensor  # in host memory, valid once `arrived` has happened
    arrived: torch.cuda.Event | None

    @property
    def has_arrived(self) -> bool:
        return self.arrived is not None and bool(self.arrived.query())  # type: ignore[no-untyped-call]

    def read(self) -> dict[str, float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return dict(zip(self.names, self.numbers.tolist(), strict=True))


class OptimizerStep:
    """Runs optimizer steps that train one group of weights, or all weights, together with all other ranks."""

    def __init__(
        self,
        components: Components,
        settings: Settings,
        agreement: Agreement,
        heartbeat: Heartbeat,
        group: TrainedGroup | None = None,
        flops: FlopMeter | None = None,
    ) -> None:
        """`group` are the weights to train, by default all; `flops` counts the operations of all groups."""
        group = group or components.groups[0]
        self._strategy, self._optimizer, self._ema = components.strategy, group.optimizer, group.ema
        self._scale, self._state, self._own = group.scale, components.state, group.state
        self._settings, self._heartbeat = settings, heartbeat
        self._optim, self._group, self._rhythm = group.optim(settings.optim), group, components.rhythm
        kind = CoupledGradientAccumulator if components.recipe.coupled else GradientAccumulator
        self._gradient = kind(components, settings, agreement, heartbeat, group, flops)
        captures = components.captures and self._optimizer.make_capturable()
        self._graphed = GraphedFunction(self._apply) if captures else None
        self._unread: _Unread | None = None
        norms_of = self._optimizer.groups() if settings.observe.log_group_norms else {}
        self._group_norms = {f"grad_norm/{name}": weights for name, weights in norms_of.items()}
        self._first = True

    @property
    def has_names(self) -> bool:
        """Whether the names of the metrics are known: after the first step."""
        return bool(self._gradient.names)

    @property
    def measured(self) -> list[str]:
        """The names of the metrics of loss(), including those that a step omits because their count is 0."""
        return metrics_in(self._gradient.names)

    @property
    def flops(self) -> FlopMeter:
        """Counts the operations of this rank's steps."""
        return self._gradient.flops

    def counts_remark(self, *, ended: bool = False) -> str | None:
        """Returns a warning if the counts that loss() returns look wrong; returned only once."""
        return self._gradient.counts.remark(ended=ended)

    def run(
        self, micro_batches: Iterator[MicroBatch], learning_rate: float, samples: int, requests: Mapping[str, float]
    ) -> StepOutcome:
        """Consumes one step's micro-batches and updates the weights.

        `samples` is the number of samples consumed after this step. Raises OutOfMemoryTogether on all ranks if the step
        can be repeated, because nothing has changed, and OutOfMemoryHere if it cannot.
        """
        summed = self._gradient.compute(micro_batches, requests)
        self._check_bad_samples()
        self._check_gradients()
        self._heartbeat.at("reduce", self._state.step + 1)
        if summed.arriving is not None:
            with summed.waits.waiting():
                summed.arriving.wait()
        try:
            self._heartbeat.at("optimizer", self._state.step + 1)
            previous, numbers = self._update(summed.sums)
            self._gradient.undo_buffers_where(numbers[_FIXED.index("found_inf")])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # The optimizer may have updated some weights and not others.
            raise OutOfMemoryHere(f"in the optimizer: {in_one_line(error)}") from error
        host, arrived = _to_host(numbers)
        names = [*_FIXED, *self._group_norms, *summed.names[2:]]
        step, own_step = self._state.step, self._rhythm.own_steps(self._group.number, self._state.step)
        self._unread = _Unread(step, own_step, samples, learning_rate, names, summed.own, summed.waits, host, arrived)
        return StepOutcome(previous, summed.requests, self._gradient.bad)

    def try_out(self, micro_batches: Iterator[MicroBatch]) -> None:
        """Runs forward and backward of micro-batches to see whether they fit into memory; changes nothing."""
        self._gradient.try_out(micro_batches)

    def _check_bad_samples(self) -> None:
        """Fails before the update if too many samples could not be read."""
        bad, limit = self._gradient.bad, self._settings.data.max_bad_samples
        if bad and self._state.bad_samples + len(bad) > limit:
            named = "; ".join(str(sample) for sample in bad[:3]) + (", …" if len(bad) > 3 else "")
            raise TrainingFailed(
                f"step {self._state.step + 1}: {format_count(self._state.bad_samples + len(bad), 'bad sample')}, "
                f"max_bad_samples is {limit}: {named}; fix the data, or raise max_bad_samples to skip such samples"
            )

    def _check_gradients(self) -> None:
        """In the first step, checks that every trained weight has a dense gradient, under any strategy."""
        if not self._first:
            return
        self._first = False
        unused = self._strategy.without_gradient()
        if unused and not self._settings.parallel.find_unused_parameters:
            raise unused_weights(unused, sharded=self._strategy.sharded)
        self._strategy.check_dense()

    def _update(self, sums: Tensor) -> tuple[StepReport | None, Tensor]:
        """Normalises, clips and steps; returns the previous step's report, and this step's numbers on the device."""
        previous = self.settle_previous()  # updates the average before the weights change again
        updated = self._graphed(sums) if self._graphed is not None and self._strategy.has_fixed_gradients else None
        return previous, self._apply(sums) if updated is None else updated

    def _apply(self, sums: Tensor) -> Tensor:
        """Runs on the device only, without a host sync, so that all of it can be recorded."""
        total, count = sums[0], sums[1]
        gradients = self._strategy.gradients()
        norm = self._strategy.norm(gradients).double()
        factor = self._gradient.expected_count * self._strategy.gradient_divisor / count
        scale = torch.ones_like(count)
        if self._scale is not None:
            scale = self._scale.value.double()
            factor = factor / scale
        norm = norm * factor
        norms = [self._norm_of(weights) * factor for weights in self._group_norms.values()]
        # A non-finite number times 0 is nan. This launches a third as many kernels as isfinite().
        found_inf = ((norm + total) * 0 != 0).logical_or_(count <= 0).double()
        if self._optim.grad_clip > 0:
            factor = factor * torch.clamp(self._optim.grad_clip / (norm + 1e-6), max=1.0)

        self._optimizer.step(gradients, factor, found_inf)
        if self._scale is not None:
            self._scale.update(found_inf)
        self._strategy.clear_gradients()
        return torch.cat([torch.stack([total, count, norm, found_inf, scale, *norms]), sums[2:]])

    def _norm_of(self, weights: Sequence[Tensor]) -> Tensor:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        return self._strategy.norm(gradients).double()

    def settle_previous(self) -> StepReport | None:
        """Settles the previous step, which may have trained another group (`steps_in_turn.py`)."""
        return self.settle()

    def settle(self) -> StepReport | None:
        """Reads the last step's numbers and updates average and state; called one step late, and before saving."""
        if self._unread is None:
            return None
        unread, self._unread = self._unread, None
        waited, numbers = unread.has_arrived, unread.read()
        total, count, norm, found_inf, scale = (numbers.pop(name) for name in _FIXED)
        skipped = found_inf != 0
        if skipped:
            self._note_skip(unread, total, count, norm, overflow=self._scale is not None and scale > 1)
        else:
            self._own.skipped_in_a_row = 0
            if self._ema is not None:
                self._ema.update(unread.own_step - self._own.skipped)
        if count > 0 and math.isfinite(count):
            self._own.expected_count = power_of_two_near(count)
        norms = {name: numbers.pop(name) for name in self._group_norms}
        loss = total / count if count else math.nan
        return StepReport(
            step=unread.step + 1,
            group=self._group.name,
            samples=unread.samples,
            loss=loss,
            count=count,
            grad_norm=norm,
            skipped=skipped,
            learning_rate=unread.learning_rate,
            metrics=per_item(numbers, count) | norms,
            own_seconds=unread.own.seconds(),
            comm_seconds=unread.waits.seconds(),
            waited=waited,
        )

    def _note_skip(self, unread: _Unread, total: float, count: float, norm: float, *, overflow: bool) -> None:
        """Counts a skipped step; too many of them end the run. `overflow`: the loss scale can still shrink."""
        state, step, limit = self._own, unread.step, self._settings.optim.max_skipped_steps
        state.skipped += 1
        if state is not self._state:
            self._state.skipped += 1  # counts the skipped steps of all groups
        if overflow and math.isfinite(total) and count > 0:
            return
        state.skipped_in_a_row += 1
        problem = f"the loss was {total}" if not math.isfinite(total) else f"the gradient's norm was {norm}"
        first, then = "check data and loss, or lower learning_rate", "lower learning_rate or grad_clip"
        if not 0 < count < math.inf:
            problem = f"loss() counted {count:g} items in the whole batch"
            first = then = "its count must be the number of items that total sums, at least 1 in a batch"
        of_group = f" of {self._group.name}" if self._group.name else ""
        if state.skipped > unread.own_step:
            raise TrainingFailed(f"step {step + 1}: {problem} before any step{of_group} succeeded; {first}")
        if state.skipped_in_a_row > limit:
            raise TrainingFailed(
                f"step {step + 1}: {problem}, for {state.skipped_in_a_row} steps{of_group} in a row "
                f"(max_skipped_steps {limit}); {then}, and resume from a checkpoint"
            )


def _to_host(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if numbers.device.type != "cuda":
        return numbers, None
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return host, arrived
