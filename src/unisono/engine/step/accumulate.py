"""Accumulates the gradient of one global batch: forward and backward of every micro-batch, summed across ranks.

Ranks synchronise their decisions once per step. When the last micro-batch has arrived, each rank starts an all-reduce
of flags (out of memory, new input shapes, unreadable samples, stop request). All ranks read the result after the last
forward pass, so they do not wait for it. Then either the last backward pass overlaps with the all-reduce of the
gradients, or, in a guarded step, the all-reduce starts after a second exchange has shown that no rank ran out of
memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.cluster.agree import Agreement, Pending
from unisono.cluster.hangs.heartbeat import Heartbeat
from unisono.data.bits import Purpose, key_of
from unisono.data.loader import BadSample, MicroBatch, positions_tensor, to_device
from unisono.data.noise import Noise
from unisono.data.resident import gathered
from unisono.data.seeding import seed_everything
from unisono.engine.recipe import Recipe
from unisono.engine.step.components import Components, TrainedGroup
from unisono.engine.step.cuda_graph import GraphedFunction
from unisono.engine.step.device_timer import DeviceTimer, WaitTimer
from unisono.engine.step.flops import FlopMeter
from unisono.engine.step.guard import Guard
from unisono.engine.step.out_of_memory import OutOfMemoryHere, OutOfMemoryTogether, in_one_line, is_out_of_memory
from unisono.engine.step.precision import autocast
from unisono.engine.step.sums import CountCheck, describe_metrics, flatten_loss, power_of_two_near, row_of
from unisono.errors import RecipeError
from unisono.parallel.strategy import Placement, sparse_gradient
from unisono.planning.peak_rates import peak_flops
from unisono.settings import Settings


@dataclass(frozen=True)
class StepSums:
    """Losses, counts and metrics of a step, summed across all ranks; the gradients are in parameter.grad."""

    names: list[str]
    sums: Tensor
    arriving: dist.Work | None  # the all-reduce of the sums
    requests: Mapping[str, float]  # flags that any rank has set, such as a stop request
    own: DeviceTimer  # this rank's time until it first waits for the others
    waits: WaitTimer  # the time that this rank waits for the others


@dataclass
class Attempt:
    """This rank's progress in one attempt to compute a step."""

    sums: Tensor | None = None
    failure: str | None = None  # the error message, if this rank ran out of memory
    arriving: dist.Work | None = None  # the all-reduce of the sums
    guarded: bool = False
    trial: bool = False  # only checks whether the micro-batches fit into memory


class GradientAccumulator:
    """Computes the gradient of a global batch, together with all other ranks."""

    def __init__(
        self,
        components: Components,
        settings: Settings,
        agreement: Agreement,
        heartbeat: Heartbeat,
        group: TrainedGroup | None = None,
        flops: FlopMeter | None = None,
    ) -> None:
        """`group`: the weights to train; by default all. `flops`: counts operations, for all groups together."""
        group = group or components.groups[0]
        self._recipe, self._strategy = components.recipe, components.strategy
        self._scale, self._state, self._own = group.scale, components.state, group.state
        self._settings, self._agreement, self._heartbeat = settings, agreement, heartbeat
        self._device, self._world = self._strategy.placement.device, self._strategy.placement.world
        self._floating = torch.float64 if settings.precision.dtype == "float64" else None
        captures = components.captures
        # A recorded backward pass cannot overlap with the all-reduce: such steps are always guarded.
        self._guard = Guard(self._strategy, -1 if captures else settings.batch.guard_steps)
        self._graphed = GraphedFunction(self._forward_and_backward) if captures else None
        self.expected_count = torch.ones((), device=self._device, dtype=torch.float64)
        """The divisor of totals before backward; a tensor on the device, because recorded kernels read it there."""
        self._expected = 1.0
        self._names: list[str] = []  # names of the sums of a micro-batch
        self.bad: list[BadSample] = []  # samples of this step that any rank could not read
        self.counts = CountCheck()
        """Checks the counts that loss() returns."""
        self.flops = flops or flop_meter(self._recipe, self._strategy.placement, settings)
        """Counts the operations of the steps."""
        self._waits = WaitTimer(self._device, active=self._world > 1)  # waits of the current step

    def compute(self, micro_batches: Iterator[MicroBatch], requests: Mapping[str, float]) -> StepSums:
        """Consumes one step's micro-batches. Raises OutOfMemoryTogether on all ranks if the step can be repeated."""
        try:
            try:
                # Needed even if this step is not recorded (a rank without samples): the next replay reads the buffers.
                with nullcontext() if self._graphed is None else self._strategy.buffers.in_place():
                    return self._compute(micro_batches, requests)
            except Exception as error:  # for instance during the all-reduce, when this rank cannot notify others
                self._note_failure(error, Attempt(), final=True)
                raise
        except OutOfMemoryTogether as error:
            # The frames of the exceptions may hold activations, whose memory the next attempt needs.
            error.__traceback__ = error.__context__ = None
            if self._graphed is not None:
                self._graphed.forget()  # the next attempt has a different shape
            self._guard.restore()
            raise

    @property
    def names(self) -> list[str]:
        """Names of the sums of a micro-batch, known after the first one."""
        return self._names

    def undo_buffers_where(self, skipped: Tensor) -> None:
        """Restores the model's buffers on the device if `skipped` is 1."""
        self._guard.buffers.undo_where(skipped)

    def try_out(self, micro_batches: Iterator[MicroBatch]) -> None:
        """Runs forward and backward of a step's first micro-batches to see whether they fit; changes nothing."""
        attempt, before = Attempt(trial=True), (self._names, self._own.expected_count)
        total: Tensor | None = None
        self._guard.begin()
        self._guard.buffers.save()
        try:
            with self._strategy.trying_out():
                # Run two micro-batches: the second needs more memory, because gradients already exist.
                for number, micro in enumerate(itertools.islice(micro_batches, 2)):
                    total = self._forward(micro, number, attempt, inject_nan=False)
                    if total is not None:
                        self._backward(total, attempt, last=False)
                    total = None
                    if micro.chunk.last or attempt.failure is not None:
                        break
            if self._agreement.start({"oom": attempt.failure is not None}).read()["oom"]:
                raise OutOfMemoryTogether(attempt.failure)
        except OutOfMemoryTogether as error:
            total = error.__traceback__ = error.__context__ = None  # frees the frames that hold activations
            raise
        finally:
            self._names, self._own.expected_count = before
            self._guard.restore()

    def _compute(self, micro_batches: Iterator[MicroBatch], requests: Mapping[str, float]) -> StepSums:
        step, number, last = self._state.step + 1, 0, False
        attempt, bad, lap = Attempt(), list[BadSample](), DeviceTimer(self._device)
        inject_nan = self._heartbeat.injector.makes_loss_nan(step)
        self._begin()
        exchange: Pending | None = None
        agreed: dict[str, float] = {}
        while not last:
            micro = self._next_micro_batch(micro_batches, bad, is_first=number == 0)
            last = micro.chunk.last
            if last:
                exchange = self._start_exchange(requests, bad, attempt)
            total = self._forward(micro, number, attempt, inject_nan) if attempt.failure is None else None
            if exchange is not None:
                lap.end()
                self._heartbeat.at("reduce", step)
                with self._waits.waiting():
                    agreed = exchange.read()
                self._act_on(agreed, bad, attempt)
            if total is not None:
                self._backward(total, attempt, last=last)
            number, total = number + 1, None  # frees the autograd graph before the next micro-batch is read
        return self._summed(attempt, agreed, lap)

    def _begin(self) -> None:
        """Begins an attempt to compute a step."""
        self._waits = WaitTimer(self._device, active=self._world > 1)
        self.flops.begin_step()
        self._guard.begin()
        self._expect(self._own.expected_count)

    def _next_micro_batch(
        self, micro_batches: Iterator[MicroBatch], bad: list[BadSample], *, is_first: bool
    ) -> MicroBatch:
        """Waits for the next micro-batch; collects its bad samples, and begins the step if it is the first."""
        self._heartbeat.at("data", self._state.step + 1)
        micro = next(micro_batches)
        bad += micro.bad if self._strategy.placement.counts else ()
        self._guard.note_shape(micro.data)
        if is_first:
            with self._waits.waiting():  # waits for the buffers of rank 0
                self._strategy.begin_step(guarded=self._guard.is_needed)
            self._guard.buffers.save()
        return micro

    def _start_exchange(self, requests: Mapping[str, float], bad: list[BadSample], attempt: Attempt) -> Pending:
        """Starts the exchange of flags between the ranks; `_act_on` acts on its result."""
        flags = {"oom": attempt.failure is not None, "guard": self._guard.is_needed, "bad": len(bad)}
        return self._agreement.start({**requests, **flags})

    def _summed(self, attempt: Attempt, agreed: dict[str, float], lap: DeviceTimer) -> StepSums:
        """Reduces gradients and sums across ranks after the last backward pass, unless that has happened already."""
        if attempt.guarded:
            self._heartbeat.at("reduce", self._state.step + 1)
            with self._waits.waiting():
                if self._agreement.start({"oom": attempt.failure is not None}).read()["oom"]:
                    raise OutOfMemoryTogether(attempt.failure)
                self._strategy.reduce()
        assert attempt.sums is not None
        if attempt.guarded and self._world > 1:
            attempt.arriving = dist.all_reduce(attempt.sums, async_op=True)
        self._guard.count_step(guarded=attempt.guarded)
        self.flops.end_step()
        return StepSums(self._names, attempt.sums, attempt.arriving, agreed, lap, self._waits)

    def _forward(self, micro: MicroBatch, number: int, attempt: Attempt, inject_nan: bool) -> Tensor | None:
        """Returns the scaled loss of a micro-batch; None if this rank ran out of memory, which `attempt` records."""
        step = self._state.step + 1
        total: Tensor | None = None
        try:
            self._heartbeat.at("forward", step)
            self._seed_dropout(number)
            positions = positions_tensor(micro.positions, self._device)
            self.flops.begin(micro)
            if self._graphed is not None and self._may_replay(micro, inject_nan) and not attempt.trial:
                self._replay(micro.data, positions, attempt)
                return None
            with self.flops.counting():
                results = self._results(micro.data, positions, last=micro.chunk.last)
            if inject_nan:
                results["total"] = results["total"] * math.nan
            weight = 0.0 if micro.is_dummy else 1.0
            row = row_of(results)
            total = results["total"]
            if not (micro.is_dummy or attempt.trial):
                self.counts.add(step, row[1], len(positions))
            # Ranks that share a sample compute the same sums, so only one of these ranks contributes them.
            counted = weight if self._strategy.placement.counts else 0.0
            row = row if counted else row * 0.0
        except Exception as error:
            self._note_failure(error, attempt)
        if number == 0 and (not self._names or self._own.expected_count == 0.0):
            mine = None if total is None else (list(results), row[1].item(), len(positions) * counted)
            self._agree_on_sums(mine, attempt)
        if total is None:
            return None
        self._check_names(list(results))
        attempt.sums = row if attempt.sums is None else attempt.sums + row
        return self._scaled(total) * weight if micro.is_dummy else self._scaled(total)

    def _results(self, data: Any, positions: Tensor, *, last: bool) -> dict[str, Tensor]:
        data = to_device(gathered(data), self._device, self._floating)
        with self._strategy.accumulating(last=last):
            return self._strategy.train(self._loss, data, positions)  # type: ignore[no-any-return]

    def _scaled(self, total: Tensor) -> Tensor:
        # Each rank of a context group computes the whole loss, and the gradients of all ranks are summed.
        context = self._strategy.placement.context
        scaled = total / self.expected_count if context == 1 else total / (self.expected_count * context)
        return scaled if self._scale is None else scaled * self._scale.value

    def _may_replay(self, micro: MicroBatch, inject_nan: bool) -> bool:
        """Whether to replay the CUDA graph: names and gradient addresses are final, and the micro-batch is regular."""
        is_settled = bool(self._names) and self._strategy.has_fixed_gradients
        return is_settled and not (inject_nan or micro.is_dummy)

    def _replay(self, data: Any, positions: Tensor, attempt: Attempt) -> None:
        """Replays the recorded forward and backward pass of a micro-batch."""
        assert self._graphed is not None
        row = self._graphed(data, positions)
        attempt.sums = row.clone() if attempt.sums is None else attempt.sums + row
        self._heartbeat.at("backward", self._state.step + 1)

    def _forward_and_backward(self, data: Any, positions: Tensor) -> Tensor:
        with self._strategy.buffers.in_place():
            results = self._results(data, positions, last=False)
            self._check_names(list(results))
            self._scaled(results["total"]).backward()  # type: ignore[no-untyped-call]
        return row_of(results)

    def _backward(self, total: Tensor, attempt: Attempt, *, last: bool) -> None:
        reduces = last and not attempt.guarded
        if reduces:
            self._strategy.reduce_in_backward()
            if self._world > 1:
                # Overlaps with the last backward pass, so it costs nothing.
                assert attempt.sums is not None
                attempt.arriving = dist.all_reduce(attempt.sums, async_op=True)
        try:
            self._heartbeat.at("backward", self._state.step + 1)
            is_timed = reduces and self._world > 1
            with self.flops.counting():
                (self._waits.marked(total) if is_timed else total).backward()  # type: ignore[no-untyped-call]
            self.flops.end()
            if is_timed:
                self._waits.end_backward()
        except Exception as error:
            if isinstance(error, NotImplementedError) and "Sparse" in str(error):  # raised by DDP's or FSDP's reduction
                raise sparse_gradient() from None
            self._note_failure(error, attempt, final=reduces)

    def _note_failure(self, error: Exception, attempt: Attempt, *, final: bool = False, where: str = "") -> None:
        """Records an out-of-memory error if the other ranks can still be notified; raises any other error."""
        if not is_out_of_memory(error):
            raise error
        attempt.failure = where + in_one_line(error)
        # The traceback holds frames, and these hold activations, whose memory the next attempt needs.
        error.__traceback__ = None
        if not self._strategy.collective:
            raise OutOfMemoryTogether(attempt.failure) from None
        if final or not (self._strategy.guardable or attempt.trial):
            raise OutOfMemoryHere(attempt.failure) from None

    def _act_on(self, agreed: Mapping[str, float], bad: list[BadSample], attempt: Attempt) -> None:
        """Acts on the flags that the ranks have exchanged."""
        self.bad = []
        if agreed["bad"]:
            self.bad = sorted((sample for part in self._agreement.all_gather(bad) for sample in part), key=_position)
        if agreed["oom"]:
            raise OutOfMemoryTogether(attempt.failure)
        attempt.guarded = bool(agreed["guard"])
        if attempt.failure is not None and not attempt.guarded:  # it failed after the exchange had started
            raise OutOfMemoryHere(attempt.failure)

    def _loss(self, model: nn.Module, data: Any, positions: Tensor) -> dict[str, Tensor]:
        """Returns the loss as a flat mapping of tensors, in which DDP, FSDP and DataParallel can find the outputs."""
        self.flops.see(data)
        recorded = nullcontext() if self._graphed is None else self._recipe.clock.recorded()
        with recorded, autocast(self._device, self._settings.precision):
            loss = self._recipe.loss(model, data, Noise(self._settings.run.seed, positions))
        return flatten_loss(loss)

    def _agree_on_sums(self, mine: tuple[list[str], float, float] | None, attempt: Attempt) -> None:
        """After the first forward pass, checks that all ranks have the same names, and estimates the step's count.

        The all-reduce matches sums by position, not by name. This is the only host-device sync.
        """
        from_ranks = self._agreement.all_gather(mine)
        results = [result for result in from_ranks if result is not None]
        if len(results) < len(from_ranks):
            raise OutOfMemoryTogether(attempt.failure)
        if any(names != results[0][0] for names, _, _ in results):
            here = describe_metrics(results[self._strategy.placement.rank if self._world > 1 else 0][0])
            raise RecipeError(f"loss(): metrics differ between ranks (here {here}); keep their names")
        self._names = self._names or results[0][0]
        if self._own.expected_count == 0.0:
            count, samples = sum(result[1] for result in results), sum(result[2] for result in results)
            per_sample = count / samples if samples and math.isfinite(count) else 1.0
            self._own.expected_count = power_of_two_near(per_sample * self._state.global_batch)
            self._expect(self._own.expected_count)

    def _expect(self, count: float) -> None:
        if count not in (0.0, self._expected):
            self._expected = count
            self.expected_count.fill_(count)

    def _check_names(self, names: list[str]) -> None:
        if names != self._names:
            before, now = describe_metrics(self._names), describe_metrics(names)
            raise RecipeError(f"loss(): metrics were {before} and now are {now}; keep their names")

    def _seed_dropout(self, micro_batch: int) -> None:
        """Seeds dropout, so that it repeats exactly at the same world size, even if a loader has drawn random numbers.

        The ranks of a context group draw the same numbers, so that their results for a whole sample agree.
        """
        placement = self._strategy.placement
        key = key_of(Purpose.DROPOUT, self._settings.run.seed, self._state.step, placement.data_rank, micro_batch)
        seed_everything(key, placement.devices)


def flop_meter(recipe: Recipe, placement: Placement, settings: Settings) -> FlopMeter:
    """Creates the counter of the operations in this rank's steps."""
    # A dispatch mode sees neither the inside of compiled blocks nor DataParallel's threads.
    can_count = not settings.precision.compile and len(placement.devices) == 1
    return FlopMeter(recipe, peak=peak_of(placement, settings), can_count=can_count, sharing=placement.context)


def peak_of(placement: Placement, settings: Settings) -> float | None:
    """Returns the peak rate of this rank's devices in FLOP/s, the 100 % of `mfu`; None if it is not known."""
    precision, own = settings.precision, settings.observe.peak_tflops
    if own is not None:
        return own * 1e12 * len(placement.devices)
    if placement.device.type != "cuda" or precision.dtype == "float64":
        return None
    kind = precision.mixed_precision if precision.mixed_precision != "no" else "tf32" if precision.tf32 else "fp32"
    # For fp8, use the peak of bf16: only a part of a step runs in fp8, and mfu should show what that part gains.
    peak = peak_flops(torch.cuda.get_device_name(placement.device), "bf16" if kind == "fp8" else kind)
    return None if peak is None else peak * len(placement.devices)


def _position(sample: BadSample) -> int:
    return sample.position
