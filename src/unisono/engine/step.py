"""One optimizer step: micro-batches, normalisation by the global count, clipping, the update, the moving average.

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
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.data.bits import Purpose, key_of
from unisono.data.loader import MicroBatch, place
from unisono.data.noise import Noise
from unisono.data.seeding import seed_everything
from unisono.engine.ema import Ema
from unisono.engine.optim import Updater
from unisono.engine.precision import LossScale, autocast
from unisono.engine.recipe import Loss, Recipe
from unisono.engine.state import TrainState
from unisono.errors import RecipeError, TrainingFailed
from unisono.parallel.strategy import Strategy
from unisono.settings import Settings

_RESERVED = {"step", "epoch", "samples", "loss", "lr", "grad_norm", "count", "world", "skipped"}
_FIXED = ("total", "count", "norm", "found_inf", "scale")


@dataclass(frozen=True)
class StepReport:
    """What came out of a step; the same on every rank."""

    step: int
    samples: int  # samples consumed when it was done
    loss: float
    count: float
    grad_norm: float
    skipped: bool
    learning_rate: float
    metrics: dict[str, float]


@dataclass
class _Unread:
    """The numbers of a step on their way from the device."""

    step: int
    samples: int
    learning_rate: float
    names: list[str]
    numbers: Tensor  # on the host, valid once `arrived` has happened
    arrived: torch.cuda.Event | None

    def read(self) -> dict[str, float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return dict(zip(self.names, self.numbers.tolist(), strict=True))


class OptimizerStep:
    """Carries out optimizer steps on this rank, together with all others."""

    def __init__(
        self,
        recipe: Recipe,
        strategy: Strategy,
        updater: Updater,
        ema: Ema | None,
        scale: LossScale | None,
        state: TrainState,
        settings: Settings,
    ) -> None:
        self._recipe, self._strategy, self._updater, self._ema = recipe, strategy, updater, ema
        self._scale, self._state, self._settings = scale, state, settings
        self._device, self._world = strategy.place.device, strategy.place.world
        self._floating = torch.float64 if settings.precision.dtype == "float64" else None
        self._unread: _Unread | None = None
        self._names: list[str] = []  # of the sums that a micro-batch gives

    def run(self, micro_batches: Iterator[MicroBatch], learning_rate: float, samples: int) -> StepReport | None:
        """Consumes one step's micro-batches and updates the weights; returns the report of the step before.

        `samples` is the number of samples consumed when this step is done.
        """
        sums, reduction = self._accumulate(micro_batches)
        if reduction is not None:
            reduction.wait()
        previous, numbers = self._update(sums)
        self._unread = _on_its_way(numbers, [*_FIXED, *self._names[2:]], self._state.step, samples, learning_rate)
        return previous

    def _accumulate(self, micro_batches: Iterator[MicroBatch]) -> tuple[Tensor, dist.Work | None]:
        """Forward and backward of every micro-batch; the sums of losses, counts and metrics over all ranks."""
        sums: Tensor | None = None
        number, last = 0, False
        reduction = None
        while not last:
            micro = next(micro_batches)
            last = micro.chunk.last
            self._seed_dropout(number)
            positions = torch.arange(micro.chunk.positions.start, micro.chunk.positions.stop, device=self._device)
            data = place(micro.data, self._device, self._floating)
            with self._strategy.accumulating(last=last):
                results = self._strategy.train(self._loss, data, positions)
                weight = 0.0 if micro.chunk.stand_in else 1.0
                row = torch.stack([value.detach().double() for value in results.values()])
                if micro.chunk.stand_in:
                    row = row * weight
                self._check_names(list(results))
                if self._state.expected_count == 0.0:
                    self._state.expected_count = self._first_count(row[1], len(positions) * weight)
                sums = row if sums is None else sums + row
                if last and self._world > 1:
                    # Started before the last backward pass and awaited after it: costs nothing.
                    reduction = dist.all_reduce(sums, async_op=True)
                self._scaled(results["total"], weight).backward()  # type: ignore[no-untyped-call]
            number += 1
        assert sums is not None
        return sums, reduction

    def _loss(self, model: nn.Module, data: Any, positions: Tensor) -> dict[str, Tensor]:
        """The recipe's loss as a flat mapping of sums: what DDP, FSDP and DataParallel can look into."""
        with autocast(self._device, self._settings.precision):
            loss = self._recipe.loss(model, data, Noise(self._settings.run.seed, positions))
        return flatten_loss(loss)

    def _scaled(self, total: Tensor, weight: float) -> Tensor:
        scaled = total * (weight / self._state.expected_count)
        return scaled if self._scale is None else scaled * self._scale.value

    def _check_names(self, names: list[str]) -> None:
        """The sums are added up by their place: every micro-batch of every rank must give the same ones."""
        if names == self._names:
            return
        if self._names:
            before, now = _shown(self._names), _shown(names)
            raise RecipeError(f"loss(): metrics were {before} and now are {now}; keep their names")
        self._names = names
        if self._world > 1:
            print_of_names = zlib.crc32(" ".join(names).encode())
            both = torch.tensor([print_of_names, -print_of_names], device=self._device)
            dist.all_reduce(both, dist.ReduceOp.MAX)
            if both[0] != -both[1]:
                raise RecipeError(f"loss(): metrics differ between ranks (here {_shown(names)}); keep their names")

    def _first_count(self, count: Tensor, samples: float) -> float:
        """A guess at the first step's count from its first micro-batches; the one place where the host waits."""
        both = torch.stack([count, torch.full_like(count, samples)])
        if self._world > 1:
            dist.all_reduce(both)
        count_found, samples_found = both.tolist()
        found = count_found / samples_found if samples_found and math.isfinite(count_found) else 1.0
        return power_of_two_near(found * self._state.global_batch)

    def _update(self, sums: Tensor) -> tuple[StepReport | None, Tensor]:
        """Normalises, clips and steps; the report of the step before, and this step's numbers on the device."""
        total, count = sums[0], sums[1]
        gradients = self._strategy.gradients()
        norm = self._strategy.norm(gradients).double()
        factor = self._state.expected_count * self._strategy.gradient_divisor / count
        scale = torch.ones_like(count)
        if self._scale is not None:
            scale = self._scale.value.double()
            factor = factor / scale
        norm = norm * factor
        # What is not finite becomes nan when multiplied by 0: a third of the small kernels that isfinite() launches.
        found_inf = ((norm + total) * 0 != 0).logical_or_(count <= 0).double()
        if self._settings.optim.grad_clip > 0:
            factor = factor * torch.clamp(self._settings.optim.grad_clip / (norm + 1e-6), max=1.0)

        previous = self.settle()  # the average must follow the weights before they change again
        self._updater.step(gradients, factor, found_inf)
        if self._scale is not None:
            self._scale.update(found_inf)
        self._strategy.clear_gradients()
        numbers = torch.cat([torch.stack([total, count, norm, found_inf, scale]), sums[2:]])
        return previous, numbers

    def settle(self) -> StepReport | None:
        """Reads the last step's numbers and does what depends on them; called one step late, and before saving."""
        if self._unread is None:
            return None
        unread, self._unread = self._unread, None
        numbers = unread.read()
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
        return StepReport(unread.step + 1, unread.samples, loss, count, norm, skipped, unread.learning_rate, per_item)

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

    def _seed_dropout(self, micro_batch: int) -> None:
        """What the model draws itself (dropout) repeats exactly at one world size, whoever drew before (a loader)."""
        place = self._strategy.place
        key = key_of(Purpose.DROPOUT, self._settings.run.seed, self._state.step, place.rank, micro_batch)
        seed_everything(key, place.devices)


def flatten_loss(loss: Any) -> dict[str, Tensor]:
    """Checks what a recipe's loss() returned and makes it a mapping of scalar tensors."""
    if not isinstance(loss, Loss):
        raise RecipeError(
            f"loss() returned {type(loss).__name__}; return unisono.Loss(total, count): a sum and how many it sums"
        )
    total = loss.total
    if not isinstance(total, Tensor) or total.dim() != 0:
        found = f"shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise RecipeError(f"loss(): total must be a scalar tensor, a sum over items; got {found}")
    if torch.is_grad_enabled() and not total.requires_grad:
        raise RecipeError(
            "loss(): total does not depend on any trainable weight (detached, or computed without the model?)"
        )

    def tensor(value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().reshape(()).to(total.device)
        return torch.full((), float(value), device=total.device, dtype=torch.float64)  # a fill: no copy from the host

    taken = sorted(_RESERVED & set(loss.metrics))
    if taken:
        raise RecipeError(f"loss(): a metric cannot be called {taken[0]}, which every run has already; rename it")
    metrics = {f"metric/{name}": tensor(value) for name, value in sorted(loss.metrics.items())}
    return {"total": total, "count": tensor(loss.count), **metrics}


def _shown(names: list[str]) -> str:
    return ", ".join(name.removeprefix("metric/") for name in names[2:]) or "none"


def power_of_two_near(value: float) -> float:
    """The power of two nearest to `value`: dividing by it is exact."""
    return 2.0 ** round(math.log2(value)) if value > 0 else 1.0


def _on_its_way(numbers: Tensor, names: list[str], step: int, samples: int, learning_rate: float) -> _Unread:
    if numbers.device.type != "cuda":
        return _Unread(step, samples, learning_rate, names, numbers, None)
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return _Unread(step, samples, learning_rate, names, host, arrived)
