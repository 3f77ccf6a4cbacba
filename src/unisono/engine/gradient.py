"""The gradient of one global batch: forward and backward of every micro-batch, summed over the ranks.

Ranks decide together, at one point of every step: when the last micro-batch has arrived, each says what it knows (out
of memory so far, shapes it has not met before, samples that could not be read, a wish to stop), and all read the answer
after the last forward pass, when it has long arrived. Then either the last backward pass lets gradients travel while it
runs, or (guarded) they travel after a second question has shown that nobody ran out of memory.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.cluster.agree import Agreement, Pending
from unisono.cluster.pulse import Pulse
from unisono.data.bits import Purpose, key_of
from unisono.data.loader import BadSample, MicroBatch, on_device, place
from unisono.data.noise import Noise
from unisono.data.resident import gathered
from unisono.data.seeding import seed_everything
from unisono.engine.build import Parts
from unisono.engine.captured import Captured
from unisono.engine.guard import Guard
from unisono.engine.memory import OutOfMemoryHere, OutOfMemoryTogether, in_one_line, is_out_of_memory
from unisono.engine.precision import autocast
from unisono.engine.recipe import Loss
from unisono.errors import RecipeError
from unisono.settings import Settings

_RESERVED = {"step", "epoch", "samples", "loss", "lr", "grad_norm", "count", "world", "skipped"}


class Lap:
    """A time on the device, read when it is long over."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._began, self._seconds = time.perf_counter(), 0.0
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._events[0].record()

    def end(self) -> None:
        """The time ends here."""
        self._seconds = time.perf_counter() - self._began
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """How long it took, on the host or on the device, whichever was slower."""
        if self._events is None:
            return self._seconds
        return max(self._seconds, float(self._events[0].elapsed_time(self._events[1])) / 1e3)


@dataclass(frozen=True)
class Summed:
    """The sums of losses, counts and metrics over all ranks; the gradients are in the parameters."""

    names: list[str]
    sums: Tensor
    arriving: dist.Work | None  # of the sums
    wishes: Mapping[str, float]  # what all ranks together want
    own: Lap  # this rank's own time: up to the point where it first waits for the others


@dataclass
class Try:
    """What this rank has of a step so far."""

    sums: Tensor | None = None
    failure: str | None = None  # it ran out of memory, and why
    arriving: dist.Work | None = None  # the sums over all ranks
    guarded: bool = False
    replayed: bool = False  # some micro-batch was
    trial: bool = False  # for its memory alone


class Gradient:
    """Computes gradients on this rank, together with all others."""

    def __init__(
        self,
        parts: Parts,
        settings: Settings,
        agreement: Agreement,
        pulse: Pulse,
    ) -> None:
        self._recipe, self._strategy, self._scale, self._state = parts.recipe, parts.strategy, parts.scale, parts.state
        self._settings, self._agreement, self._pulse = settings, agreement, pulse
        self._device, self._world = self._strategy.place.device, self._strategy.place.world
        self._floating = torch.float64 if settings.precision.dtype == "float64" else None
        captures = parts.captures
        # A recorded backward pass cannot let gradients travel while it runs: such steps are guarded throughout.
        self._guard = Guard(self._strategy, -1 if captures else settings.batch.guard_steps)
        self._captured = Captured(self._forward_and_backward) if captures else None
        self.expected_count = torch.ones((), device=self._device, dtype=torch.float64)
        """What totals are divided by before backward: the state's number, where recorded kernels find it."""
        self._expected = 1.0
        self._names: list[str] = []  # of the sums that a micro-batch gives
        self.bad: list[BadSample] = []  # samples of this step that could not be read, on all ranks

    def compute(self, micro_batches: Iterator[MicroBatch], wishes: Mapping[str, float]) -> Summed:
        """Consumes one step's micro-batches. OutOfMemoryTogether: on all ranks, and the step can be done again."""
        try:
            try:
                return self._compute(micro_batches, wishes)
            except Exception as error:  # also where nobody can be told: while gradients travel, or data is read
                self._note_failure(error, Try(), final=True)
                raise
        except OutOfMemoryTogether as error:
            error.__traceback__ = error.__context__ = None  # their frames may hold the activations that are in the way
            if self._captured is not None:
                self._captured.forget()  # the next try has another shape
            self._guard.restore()
            raise

    def try_out(self, micro_batches: Iterator[MicroBatch]) -> None:
        """Forward and backward of the first micro-batches of a step, for their memory alone: nothing changes."""
        this, before = Try(trial=True), (self._names, self._state.expected_count)
        total: Tensor | None = None
        self._guard.begin()
        try:
            # The second one is computed while the gradients of the first are there.
            for number, micro in enumerate(itertools.islice(micro_batches, 2)):
                total = self._forward(micro, number, this, spoilt=False)
                if total is not None:
                    self._backward(total, this, last=False)
                total = None
                if micro.chunk.last or this.failure is not None:
                    break
            if self._agreement.start({"oom": this.failure is not None}).read()["oom"]:
                raise OutOfMemoryTogether(this.failure)
        except OutOfMemoryTogether as error:
            total = error.__traceback__ = error.__context__ = None  # as in `compute`
            raise
        finally:
            self._names, self._state.expected_count = before
            self._guard.restore()

    def _compute(self, micro_batches: Iterator[MicroBatch], wishes: Mapping[str, float]) -> Summed:
        step, number, last = self._state.step + 1, 0, False
        this, bad, lap = Try(), list[BadSample](), Lap(self._device)
        spoilt = self._pulse.injector.spoils(step)
        self._guard.begin()
        self._expect(self._state.expected_count)
        asked: Pending | None = None
        agreed: dict[str, float] = {}
        while not last:
            self._pulse.at("data", step)
            micro = next(micro_batches)
            last = micro.chunk.last
            bad += micro.bad
            self._guard.see(micro.data)
            if number == 0:
                self._strategy.begin_step(guarded=self._guard.wanted)
            if last:
                mine = {"oom": this.failure is not None, "guard": self._guard.wanted, "bad": len(bad)}
                asked = self._agreement.start({**wishes, **mine})
            total = self._forward(micro, number, this, spoilt) if this.failure is None else None
            if asked is not None:
                lap.end()
                self._pulse.at("reduce", step)
                agreed = asked.read()
                self._act_on(agreed, bad, this)
            if total is not None:
                self._backward(total, this, last=last)
            number, total = number + 1, None  # the graph is not kept while the next micro-batch is read
        return self._summed(this, agreed, lap)

    def _summed(self, this: Try, agreed: dict[str, float], lap: Lap) -> Summed:
        """After the last backward pass: gradients and sums over all ranks, if they are not there yet."""
        if this.guarded:
            self._pulse.at("reduce", self._state.step + 1)
            if self._agreement.start({"oom": this.failure is not None}).read()["oom"]:
                raise OutOfMemoryTogether(this.failure)
            self._strategy.reduce()
        assert this.sums is not None
        if this.guarded and self._world > 1:
            this.arriving = dist.all_reduce(this.sums, async_op=True)
        self._guard.passed(guarded=this.guarded, replayed=this.replayed)
        return Summed(self._names, this.sums, this.arriving, agreed, lap)

    def _forward(self, micro: MicroBatch, number: int, this: Try, spoilt: bool) -> Tensor | None:
        """The scaled loss of a micro-batch; None, and the failure noted, when memory ran out."""
        step = self._state.step + 1
        total: Tensor | None = None
        try:
            self._pulse.at("forward", step)
            self._seed_dropout(number)
            positions = on_device(micro.positions, self._device)
            if self._captured is not None and self._may_replay(micro, spoilt) and not this.trial:
                self._replay(micro.data, positions, this)
                return None
            results = self._results(micro.data, positions, last=micro.chunk.last)
            if spoilt:
                results["total"] = results["total"] * math.nan
            weight = 0.0 if micro.stand_in else 1.0
            row = row_of(results)
            row = row * weight if micro.stand_in else row
            total = results["total"]
        except Exception as error:
            self._note_failure(error, this)
        if number == 0 and (not self._names or self._state.expected_count == 0.0):
            known = None if total is None else (list(results), row[1].item(), len(positions) * weight)
            self._agree_on_sums(known, this)
        if total is None:
            return None
        self._check_names(list(results))
        this.sums = row if this.sums is None else this.sums + row
        return self._scaled(total) * weight if micro.stand_in else self._scaled(total)

    def _results(self, data: Any, positions: Tensor, *, last: bool) -> dict[str, Tensor]:
        data = place(gathered(data), self._device, self._floating)
        with self._strategy.accumulating(last=last):
            return self._strategy.train(self._loss, data, positions)  # type: ignore[no-any-return]

    def _scaled(self, total: Tensor) -> Tensor:
        scaled = total / self.expected_count
        return scaled if self._scale is None else scaled * self._scale.value

    def _may_replay(self, micro: MicroBatch, spoilt: bool) -> bool:
        """Not before the names of the sums are known, gradients have their places, and for nothing unusual."""
        known = bool(self._names) and self._strategy.gradients_stay
        return known and not (spoilt or micro.stand_in)

    def _replay(self, data: Any, positions: Tensor, this: Try) -> None:
        """Forward and backward pass of a micro-batch in one go."""
        assert self._captured is not None
        row = self._captured(data, positions)
        this.replayed |= self._captured.replayed
        this.sums = row.clone() if this.sums is None else this.sums + row
        self._pulse.at("backward", self._state.step + 1)

    def _forward_and_backward(self, data: Any, positions: Tensor) -> Tensor:
        results = self._results(data, positions, last=False)
        self._check_names(list(results))
        self._scaled(results["total"]).backward()  # type: ignore[no-untyped-call]
        return row_of(results)

    def _backward(self, total: Tensor, this: Try, *, last: bool) -> None:
        travels = last and not this.guarded
        if travels:
            self._strategy.arm()
            if self._world > 1:
                # Started before the last backward pass and awaited after it: costs nothing.
                assert this.sums is not None
                this.arriving = dist.all_reduce(this.sums, async_op=True)
        try:
            self._pulse.at("backward", self._state.step + 1)
            total.backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            self._note_failure(error, this, final=travels)

    def _note_failure(self, error: Exception, this: Try, *, final: bool = False) -> None:
        """Remembers that memory ran out, where the other ranks can still be told; anything else is raised."""
        if not is_out_of_memory(error):
            raise error
        this.failure = in_one_line(error)
        # The traceback holds the frames, and they hold the activations that are in the way.
        error.__traceback__ = None
        if not self._strategy.collective:
            raise OutOfMemoryTogether(this.failure) from None
        if final or not self._strategy.guardable:
            raise OutOfMemoryHere(this.failure) from None

    def _act_on(self, agreed: Mapping[str, float], bad: list[BadSample], this: Try) -> None:
        """All ranks know now what each of them has met before its last forward pass."""
        self.bad = []
        if agreed["bad"]:
            self.bad = sorted((sample for part in self._agreement.agree_all(bad) for sample in part), key=_position)
        if agreed["oom"]:
            raise OutOfMemoryTogether(this.failure)
        this.guarded = bool(agreed["guard"])
        if this.failure is not None and not this.guarded:  # in the last forward pass, after the others were asked
            raise OutOfMemoryHere(this.failure)

    def _loss(self, model: nn.Module, data: Any, positions: Tensor) -> dict[str, Tensor]:
        """The recipe's loss as a flat mapping of sums: what DDP, FSDP and DataParallel can look into."""
        with autocast(self._device, self._settings.precision):
            loss = self._recipe.loss(model, data, Noise(self._settings.run.seed, positions))
        return flatten_loss(loss)

    def _agree_on_sums(self, mine: tuple[list[str], float, float] | None, this: Try) -> None:
        """After the first forward pass: the same names on all ranks, and a guess at the first step's count.

        The sums are added up by their place. The one point where the host waits for the device.
        """
        everybody = self._agreement.agree_all(mine)
        known = [each for each in everybody if each is not None]
        if len(known) < len(everybody):
            raise OutOfMemoryTogether(this.failure)
        if any(names != known[0][0] for names, _, _ in known):
            here = _shown(known[self._strategy.place.rank if self._world > 1 else 0][0])
            raise RecipeError(f"loss(): metrics differ between ranks (here {here}); keep their names")
        self._names = self._names or known[0][0]
        if self._state.expected_count == 0.0:
            count, samples = sum(each[1] for each in known), sum(each[2] for each in known)
            found = count / samples if samples and math.isfinite(count) else 1.0
            self._state.expected_count = power_of_two_near(found * self._state.global_batch)
            self._expect(self._state.expected_count)

    def _expect(self, count: float) -> None:
        if count not in (0.0, self._expected):
            self._expected = count
            self.expected_count.fill_(count)

    def _check_names(self, names: list[str]) -> None:
        if names != self._names:
            before, now = _shown(self._names), _shown(names)
            raise RecipeError(f"loss(): metrics were {before} and now are {now}; keep their names")

    def _seed_dropout(self, micro_batch: int) -> None:
        """What the model draws itself (dropout) repeats exactly at one world size, whoever drew before (a loader)."""
        place_ = self._strategy.place
        key = key_of(Purpose.DROPOUT, self._settings.run.seed, self._state.step, place_.rank, micro_batch)
        seed_everything(key, place_.devices)


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

    def tensor(name: str, value: Any) -> Tensor:
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.detach().reshape(()).to(total.device)
        if isinstance(value, Tensor | bool | str) or not hasattr(value, "__float__"):
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise RecipeError(f"loss(): {name} must be one number, a sum over items; got {found}")
        return torch.full((), float(value), device=total.device, dtype=torch.float64)  # a fill: no copy from the host

    taken = sorted(_RESERVED & set(loss.metrics))
    if taken:
        raise RecipeError(f"loss(): a metric cannot be called {taken[0]}, which every run has already; rename it")
    metrics = {f"metric/{name}": tensor(name, value) for name, value in sorted(loss.metrics.items())}
    return {"total": total, "count": tensor("count", loss.count), **metrics}


def row_of(results: Mapping[str, Tensor]) -> Tensor:
    """The sums in one tensor, as the ranks add them up."""
    return torch.stack([value.detach().double() for value in results.values()])


def power_of_two_near(value: float) -> float:
    """The power of two nearest to `value`: dividing by it is exact."""
    return 2.0 ** round(math.log2(value)) if value > 0 else 1.0


def _shown(names: list[str]) -> str:
    return ", ".join(name.removeprefix("metric/") for name in names[2:]) or "none"


def _position(sample: BadSample) -> int:
    return sample.position
