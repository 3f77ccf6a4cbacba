"""A trainer that measures its own steps, alternating with the steps of the hand-written loop.

Both loops run in the same processes and alternate in blocks of steps: unisono first in one round, the hand-written loop
first in the next round. Both therefore run under the same conditions, and the ratio of two adjacent blocks hardly
changes if the machine becomes slower or faster during the measurement.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing
from time import perf_counter
from typing import Any

import torch
from torch import nn

from unisono.benching.cases import UNTIMED
from unisono.benching.comparable import why_no_loop
from unisono.benching.hand_data import HandData
from unisono.benching.hand_loop import HandLoop, LossOfModel
from unisono.benching.model_copy import bytes_on_host, copy_of
from unisono.benching.random_draws import draws_random_numbers
from unisono.benching.tokens import tokens_in
from unisono.data.loader import positions_tensor, to_device
from unisono.data.resident import gathered, is_resident
from unisono.engine.length import Length, Result
from unisono.engine.step.optimizer_step import StepReport
from unisono.engine.step.out_of_memory import is_out_of_memory
from unisono.engine.trainer import Trainer
from unisono.engine.training_run import TrainingRun
from unisono.errors import TrainingFailed
from unisono.observe.meter import gpu_memory_gib, host_memory_gib
from unisono.settings import PrecisionSettings

_TOKEN_BATCHES = 8  # number of micro-batches in which tokens are counted


class MeasuredTrainer(Trainer):
    """Trains blocks of steps and measures them, without saving or evaluating."""

    def __init__(
        self,
        run: TrainingRun,
        open_folder: Callable[[], None],
        *,
        steps: int,
        warmup: int,
        rounds: int,
        overhead: bool,
    ) -> None:
        super().__init__(run, open_folder)
        self._steps, self._warmup, self._rounds = steps, warmup, rounds
        self._device = run.components.strategy.placement.device
        self._losses: list[float] = []
        self._counts: list[float] = []
        self._initial: nn.Module | None = None  # a copy of the model before the first step
        self._hand: HandLoop | None = None
        self._why_no_hand = why_no_loop(run) if overhead else "it was switched off (--overhead no)"
        if self._why_no_hand is None:
            self._initial, self._why_no_hand = self._alike(lambda: copy_of(run.components.strategy.model))
        self.on_report = self._note
        self._blocks: dict[str, list[float]] = {"unisono": [], "hand": []}  # seconds per step in each timed block
        self.numbers: dict[str, Any] = {}
        """All measurements, available after training has ended."""
        self._memory_gib = 0.0  # peak memory of this rank before the hand-written loop is built
        self._tokens_per_sample: float | None = None

    def train(self) -> Result:
        """Warms up both loops, then measures them alternately."""
        whole = self.length
        with self._finishing_saves():
            try:
                self._find_micro_batch()
                self._feed.begin(self._sizer.plan)
                self.length = Length(self._strides.after(0, self._warmup), whole.steps)
                stopped = self._loop()  # ends with a metrics record, so that later records do not include the warm-up
                self.length = whole
                if not stopped:
                    self._after_warmup()
                    stopped = self._measure()
            finally:
                self._feed.close()
                if self._hand is not None:
                    self._hand.close()
            if not stopped:
                self.numbers = self._numbers()
        self._recorder.close()
        return Result(self._folder.path, "stopped" if stopped else "done", self.state.step, {})

    def _train_to(self, step: int) -> bool:
        """Trains up to a step in the engine's real loop; returns True if a signal stopped it."""
        return self._loop(self._strides.after(self.state.samples, step - self.state.step))

    def _measure(self) -> bool:
        for number in range(self._rounds):
            turns = [self._block_of_unisono, self._block_by_hand]
            for turn in turns if number % 2 == 0 else turns[::-1]:
                if turn():
                    return True
        return False

    def _block_of_unisono(self) -> bool:
        if self._train_to(self.state.step + UNTIMED):
            return True
        stopped = False

        def block() -> None:
            nonlocal stopped
            stopped = self._train_to(self.state.step + self._steps)

        seconds = self._seconds(block)
        self._blocks["unisono"].append(seconds / self._steps)
        return stopped

    def _block_by_hand(self) -> bool:
        hand = self._hand
        if hand is None:
            return False
        self._heartbeat.at("prepare", self.state.step)
        with self._recorder.not_training():
            hand.train(UNTIMED)
            self._blocks["hand"].append(self._seconds(lambda: hand.train(self._steps)) / self._steps)
        return bool(self._agreement.start({"stop": self._rank.is_asked_to_stop}).read()["stop"])

    def _seconds(self, block: Callable[[], None]) -> float:
        """Runs a block; returns the seconds that the slowest rank takes, including the work of its device."""
        self._synchronize()
        self._agreement.all_gather(None)  # a barrier
        began = perf_counter()
        block()
        self._synchronize()
        return max(self._agreement.all_gather(perf_counter() - began))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _after_warmup(self) -> None:
        self._synchronize()
        peak = gpu_memory_gib(self._device)
        copied = 0 if self._initial is None else bytes_on_host(self._initial)
        self._memory_gib = max(0.0, host_memory_gib() - copied / 2**30) if peak is None else peak
        self._tokens_per_sample = self._count_tokens()
        if self._initial is not None:
            with self._recorder.not_training():
                self._heartbeat.at("prepare", self.state.step)
                self._start_hand(self._initial)
            self._initial = None

    def _start_hand(self, model: nn.Module) -> None:
        """Builds the hand-written loop and trains its warm-up steps, so that both loops are at the same step."""
        facts, self._why_no_hand = self._alike(lambda: self._facts_of(model))
        if facts is None:
            return
        by_rank = self._agreement.all_gather(facts)
        reading, losing = (any(each[number] for each in by_rank) for number in (0, 1))
        loader = HandData(self._run, self._feed.data, self._order, self._sizer.plan, draws=reading)
        # Batches with the same number of samples may have different counts, for example of tokens without padding.
        shares = set(self._agreement.all_gather((facts[2], loader.samples_at_once)))
        is_even = len(shares) == 1 and loader.samples_at_once > 0 and len(set(self._counts)) == 1
        try:
            self._hand = HandLoop(self._run, model, loader, is_even=is_even, draws=losing)
            self._hand.expect(self._counts[0] / self.components.strategy.placement.world)
            self._hand.train(self._warmup)
        except Exception as error:
            if is_out_of_memory(error):  # other ranks may wait for this one, so the run cannot continue
                raise TrainingFailed("no memory for the hand-written loop; pass --overhead no") from error
            raise

    def _facts_of(self, model: nn.Module) -> tuple[bool, bool, float]:
        """Returns whether reading a sample and computing the loss draw random numbers, and the items per sample.

        Moves the model to the device. Runs no collective, so a rank that runs out of memory can report this.
        """
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.to(self._device)
        data = self._feed.data
        reading = not is_resident(data) and draws_random_numbers(lambda: data[0], torch.device("cpu"))
        buffers = [buffer.clone() for buffer in model.buffers()]
        probe = LossOfModel(model, self.components.recipe, self.settings.run.seed, self.settings.precision)
        losing, count = self._probe(probe)
        for buffer, before in zip(model.buffers(), buffers, strict=True):  # restore batch-norm statistics
            buffer.copy_(before)
        return reading, losing, count

    def _probe(self, loss: LossOfModel) -> tuple[bool, float]:
        """Computes the loss of a micro-batch; returns whether it draws random numbers, and its items per sample."""
        with closing(self._feed.for_trial(self._sizer.plan)) as loader:
            micro = next(loader)
        floating = torch.float64 if self.settings.precision.dtype == "float64" else None
        data, counts = to_device(gathered(micro.data), self._device, floating), list[float]()

        def compute() -> None:
            with torch.no_grad():
                counts.append(float(loss(data, positions_tensor(micro.positions, self._device))[1]))

        return draws_random_numbers(compute, self._device), counts[0] / len(micro.positions)

    def _count_tokens(self) -> float | None:
        """Returns the mean number of tokens per sample in the next micro-batches; None if it cannot be determined."""
        with closing(self._feed.for_trial(self._sizer.plan)) as loader:
            micro_batches = list(itertools.islice(loader, _TOKEN_BATCHES))
        counts = [tokens_in(gathered(micro.data)) for micro in micro_batches]
        samples = sum(len(micro.positions) for micro in micro_batches)
        return None if None in counts else sum(filter(None, counts)) / samples

    def _alike(self, build: Callable[[], Any]) -> tuple[Any, str | None]:
        """Builds an object on every rank; returns None and the reason if a rank failed to build it."""
        built, failure = None, None
        try:
            built = build()
        except Exception as error:
            if is_out_of_memory(error):
                failure = "there is not enough memory for a second copy of the model"
            elif isinstance(error, TypeError | RuntimeError | NotImplementedError) and self.state.step == 0:
                failure = f"the model cannot be copied ({error})"
            else:
                raise
        failures = [each for each in self._agreement.all_gather(failure) if each is not None]
        return (None, failures[0]) if failures else (built, None)

    def _numbers(self) -> dict[str, Any]:
        """Returns all measurements, which are the same on every rank."""
        strategy, plan, counts = self.components.strategy, self._sizer.plan, self._counts[self._warmup :]
        return {
            "ranks": strategy.placement.world,
            "strategy": strategy.name,
            "device": device_name(self._device),
            "on_gpu": self._device.type == "cuda",
            "threads": torch.get_num_threads(),
            "precision": _precision(self.settings.precision),
            "global_batch": plan.global_batch,
            "micro_batch": plan.micro_batch,
            "num_micro_batches": plan.accumulation,
            "seconds": self._blocks,
            "losses": self._losses,
            "hand_losses": None if self._hand is None else self._hand.losses(),
            "why_no_hand": self._why_no_hand,
            "memory_gib": self._agreement.all_gather(self._memory_gib),
            "items_per_step": sum(counts) / len(counts),
            "tokens_per_sample": self._tokens_per_sample,
            "has_peak_rate": self._step.flops.peak is not None,
        }

    def _note(self, report: StepReport) -> None:
        self._losses.append(report.loss)
        self._counts.append(report.count)

    def _warm_up_saves(self) -> None:
        """Does nothing, because this run never saves and so needs no buffers for it."""


def device_name(device: torch.device) -> str:
    """Returns the name of a device, for the result."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _precision(settings: PrecisionSettings) -> str:
    return settings.dtype if settings.mixed_precision == "no" else settings.mixed_precision
