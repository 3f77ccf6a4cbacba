"""One optimizer step: the gradient of a global batch, normalised by its count, clipped, applied, and averaged.

The gradient of a step is  sum over all micro-batches and ranks of grad(total)  /  sum of their counts.  The counts are
known only after the last forward pass, so backward runs on  total / expected count  (a power of two, so the division
is exact; without it fp16 sums would overflow) and one factor corrects it after the ranks have summed:

    factor = expected count x what the strategy divided by / true count / loss scale x clipping

Nothing here waits for the device. Whether a step was finite is decided there, by the fused optimizer's `found_inf`,
and read by the host one step later, when the numbers have long arrived; the moving average follows at that moment too,
so that a skipped step leaves it alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.cluster.agree import Agreement
from unisono.cluster.pulse import Pulse
from unisono.data.loader import BadSample, MicroBatch
from unisono.engine.build import Parts
from unisono.engine.captured import Captured
from unisono.engine.coupled import CoupledGradient
from unisono.engine.gradient import Gradient, Lap, power_of_two_near
from unisono.engine.memory import OutOfMemoryHere, in_one_line, is_out_of_memory
from unisono.errors import TrainingFailed
from unisono.settings import Settings

_FIXED = ("total", "count", "norm", "found_inf", "scale")


@dataclass(frozen=True)
class StepReport:
    """What came out of a step; the same on every rank, but for its own time."""

    step: int
    samples: int  # samples consumed when it was done
    loss: float
    count: float
    grad_norm: float
    skipped: bool
    learning_rate: float
    metrics: dict[str, float]
    own_seconds: float  # what this rank needed before it first waited for the others
    waited: bool  # this rank's GPU had done it before the host had launched the next one's passes


@dataclass(frozen=True)
class Stepped:
    """What is known when a step has been sent on its way."""

    before: StepReport | None  # of the step before this one
    wishes: Mapping[str, float]  # what all ranks together want
    bad: list[BadSample]  # samples of this step that could not be read, on all ranks


@dataclass
class _Unread:
    """The numbers of a step on their way from the device."""

    step: int
    samples: int
    learning_rate: float
    names: list[str]
    own: Lap
    numbers: Tensor  # on the host, valid once `arrived` has happened
    arrived: torch.cuda.Event | None

    @property
    def is_there(self) -> bool:
        return self.arrived is not None and bool(self.arrived.query())  # type: ignore[no-untyped-call]

    def read(self) -> dict[str, float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return dict(zip(self.names, self.numbers.tolist(), strict=True))


class OptimizerStep:
    """Carries out optimizer steps on this rank, together with all others."""

    def __init__(self, parts: Parts, settings: Settings, agreement: Agreement, pulse: Pulse) -> None:
        self._strategy, self._updater, self._ema = parts.strategy, parts.updater, parts.ema
        self._scale, self._state, self._settings, self._pulse = parts.scale, parts.state, settings, pulse
        kind = CoupledGradient if parts.recipe.coupled else Gradient
        self._gradient = kind(parts, settings, agreement, pulse)
        captures = parts.captures and self._updater.make_capturable()
        self._captured = Captured(self._apply) if captures else None
        self._unread: _Unread | None = None

    def run(
        self, micro_batches: Iterator[MicroBatch], learning_rate: float, samples: int, wishes: Mapping[str, float]
    ) -> Stepped:
        """Consumes one step's micro-batches and updates the weights.

        `samples` is the number of samples consumed when this step is done. Raises OutOfMemoryTogether, on all ranks,
        when nothing has happened and the step can be done again, and OutOfMemoryHere where it cannot.
        """
        summed = self._gradient.compute(micro_batches, wishes)
        self._check_bad_samples()
        self._pulse.at("reduce", self._state.step + 1)
        if summed.arriving is not None:
            summed.arriving.wait()
        try:
            self._pulse.at("optimizer", self._state.step + 1)
            before, numbers = self._update(summed.sums)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # Some weights may have stepped and others not.
            raise OutOfMemoryHere(f"in the optimizer: {in_one_line(error)}") from error
        host, arrived = _to_host(numbers)
        names = [*_FIXED, *summed.names[2:]]
        self._unread = _Unread(self._state.step, samples, learning_rate, names, summed.own, host, arrived)
        return Stepped(before, summed.wishes, self._gradient.bad)

    def try_out(self, micro_batches: Iterator[MicroBatch]) -> None:
        """Forward and backward of one step's micro-batches for their memory alone; nothing changes."""
        self._gradient.try_out(micro_batches)

    def _check_bad_samples(self) -> None:
        """Before anything is updated: a step that would leave out too many samples does not happen."""
        bad, limit = self._gradient.bad, self._settings.data.max_bad_samples
        if bad and self._state.bad_samples + len(bad) > limit:
            named = "; ".join(str(sample) for sample in bad[:3]) + (", …" if len(bad) > 3 else "")
            raise TrainingFailed(
                f"step {self._state.step + 1}: {self._state.bad_samples + len(bad)} bad samples, max_bad_samples is "
                f"{limit}: {named}; mend the data, or raise max_bad_samples to leave them out"
            )

    def _update(self, sums: Tensor) -> tuple[StepReport | None, Tensor]:
        """Normalises, clips and steps; the report of the step before, and this step's numbers on the device."""
        previous = self.settle()  # the average must follow the weights before they change again
        updated = self._captured(sums) if self._captured is not None and self._strategy.gradients_stay else None
        return previous, self._apply(sums) if updated is None else updated

    def _apply(self, sums: Tensor) -> Tensor:
        """On the device alone: nothing here waits for it (on the GPU), and all of it can be recorded."""
        total, count = sums[0], sums[1]
        gradients = self._strategy.gradients()
        norm = self._strategy.norm(gradients).double()
        factor = self._gradient.expected_count * self._strategy.gradient_divisor / count
        scale = torch.ones_like(count)
        if self._scale is not None:
            scale = self._scale.value.double()
            factor = factor / scale
        norm = norm * factor
        # What is not finite becomes nan when multiplied by 0: a third of the small kernels that isfinite() launches.
        found_inf = ((norm + total) * 0 != 0).logical_or_(count <= 0).double()
        if self._settings.optim.grad_clip > 0:
            factor = factor * torch.clamp(self._settings.optim.grad_clip / (norm + 1e-6), max=1.0)

        self._updater.step(gradients, factor, found_inf)
        if self._scale is not None:
            self._scale.update(found_inf)
        self._strategy.clear_gradients()
        return torch.cat([torch.stack([total, count, norm, found_inf, scale]), sums[2:]])

    def settle(self) -> StepReport | None:
        """Reads the last step's numbers and does what depends on them; called one step late, and before saving."""
        if self._unread is None:
            return None
        unread, self._unread = self._unread, None
        waited, numbers = unread.is_there, unread.read()
        total, count, norm, found_inf, scale = (numbers.pop(name) for name in _FIXED)
        skipped = found_inf != 0
        if skipped:
            self._note_skip(unread.step, total, norm, overflow=self._scale is not None and scale > 1)
        else:
            self._state.skipped_in_a_row = 0
            if self._ema is not None:
                self._ema.update(unread.step - self._state.skipped)
        if count > 0 and math.isfinite(count):
            self._state.expected_count = power_of_two_near(count)
        per_item = {name.removeprefix("metric/"): value / count if count else 0.0 for name, value in numbers.items()}
        loss = total / count if count else math.nan
        return StepReport(
            step=unread.step + 1,
            samples=unread.samples,
            loss=loss,
            count=count,
            grad_norm=norm,
            skipped=skipped,
            learning_rate=unread.learning_rate,
            metrics=per_item,
            own_seconds=unread.own.seconds(),
            waited=waited,
        )

    def _note_skip(self, step: int, total: float, norm: float, *, overflow: bool) -> None:
        """Counts a skipped step, on all ranks alike; too many end the run. `overflow`: fp16's scale can still fall."""
        state, limit = self._state, self._settings.optim.max_skipped_steps
        state.skipped += 1
        if overflow and math.isfinite(total):
            return
        state.skipped_in_a_row += 1
        what = f"the loss was {total}" if not math.isfinite(total) else f"the gradient's norm was {norm}"
        if state.skipped > step:
            raise TrainingFailed(
                f"step {step + 1}: {what} before any step succeeded; check data and loss, or lower learning_rate"
            )
        if state.skipped_in_a_row > limit:
            raise TrainingFailed(
                f"step {step + 1}: {what}, for {state.skipped_in_a_row} steps in a row "
                f"(max_skipped_steps {limit}); lower learning_rate or grad_clip, and resume from a checkpoint"
            )


def _to_host(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if numbers.device.type != "cuda":
        return numbers, None
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return host, arrived
