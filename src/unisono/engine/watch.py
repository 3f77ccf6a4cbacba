"""What the loop shows and writes down, on the main rank; other ranks only lend their timings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Timer
from typing import Any

from unisono.cluster.agree import Agreement
from unisono.cluster.lifetime import flush_streams
from unisono.data.loader import MicroBatch
from unisono.engine.step import StepReport
from unisono.observe.folder import RunFolder
from unisono.observe.idle import Idle
from unisono.observe.meter import Meter, gpu_memory_gib, host_memory_gib, slowest
from unisono.observe.progress import Progress
from unisono.observe.straggler import Stragglers
from unisono.observe.trackers import Tracker, open_trackers, points_of
from unisono.parallel.strategy import Placement
from unisono.settings import ObserveSettings

_SLOW_S = 10.0


class Watch:
    """Progress line, metrics.jsonl and trackers of one run."""

    def __init__(
        self,
        folder: RunFolder,
        place: Placement,
        settings: ObserveSettings,
        agreement: Agreement,
        *,
        total_steps: int,
        start_step: int,
        start_samples: int,
        recordable: bool,
        open_folder: Callable[[], None],
    ) -> None:
        self._folder, self._place, self._settings, self._agreement = folder, place, settings, agreement
        self._main = place.rank == 0
        self._start_step, self._samples = start_step, start_samples
        self._open, self._opened = open_folder, False
        self._progress = Progress(total_steps, enabled=self._main)
        self._meter, self._stragglers, self._idle = Meter(), Stragglers(), Idle(recordable=recordable)
        self._trackers: list[Tracker] = []

    def first_step_done(self) -> None:
        """The first time: from now on lines go to files."""
        if self._opened:
            return
        self._opened = True
        self._open()
        if self._main:
            self._trackers = open_trackers(self._settings, self._folder.path, self._start_step)

    def step(self) -> AbstractContextManager[Any]:
        """Around an optimizer step."""
        return self._meter.phase("step")

    def aside(self) -> AbstractContextManager[Any]:
        """Around what is not training: evaluation, previews, the stall of a save."""
        return self._meter.phase("aside")

    def add_step(self, report: StepReport) -> None:
        """What is known of this rank's part in a step."""
        self._meter.add("own", report.own_seconds)
        self._idle.step(waited=report.waited)

    def waiting(self, feed: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The feed's micro-batches, with the time spent waiting for them noted."""
        while True:
            with self._meter.phase("data"):
                micro = next(feed)
            yield micro

    def message(self, text: str) -> None:
        """A line for the user, once (from the main rank)."""
        self._progress.message(text) if self._main else None

    @contextmanager
    def saying_if_slow(self, text: str) -> Iterator[None]:
        """Around what may take long: says what is going on, where nothing else would tell it from a hang."""
        timer = Timer(_SLOW_S, self.message, [text])
        timer.daemon = True
        if self._main:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def step_record(self, report: StepReport, num_samples: int, skipped: int) -> dict[str, Any]:
        """Writes down a logged step; every rank calls it, because each lends its timings."""
        timing = self._meter.interval(report.samples - self._samples)
        self._samples = report.samples
        record: dict[str, Any] = {
            "step": report.step,
            "epoch": round(report.samples / num_samples, 4),
            "samples": report.samples,
            "loss": report.loss,
            "lr": report.learning_rate,
            "grad_norm": report.grad_norm,
            "count": report.count,
            **report.metrics,
            **timing,
            "world": self._place.world,
            "skipped": skipped,
        }
        record |= self._per_rank(timing, report.step)
        advice = self._idle.look(timing.get("step_ms", 0.0), timing.get("data_wait_ms", 0.0))
        if advice is not None:
            self.message(advice)
        if not self._main:
            return record
        memory = gpu_memory_gib(self._place.device)
        record["mem_gib"] = host_memory_gib() if memory is None else memory
        self._folder.metrics(record)
        self._progress.update(**record)
        for tracker in self._trackers:
            tracker.log(report.step, {key: value for key, value in record.items() if isinstance(value, int | float)})
        return record

    def _per_rank(self, timing: Mapping[str, float], step: int) -> dict[str, Any]:
        """What each rank needs itself, so that the slowest is named: in lockstep that is what tells ranks apart."""
        if self._place.world == 1 or not timing:  # no step since the last record, on all ranks alike
            return {}
        mine = [round(timing.get(name, 0.0), 3) for name in ("step_ms", "own_ms", "data_wait_ms")]
        steps, owns, waits = zip(*self._agreement.agree_all(mine), strict=True)  # host to host: the GPU is left alone
        rank, _ = slowest(list(owns))
        straggler = self._stragglers.look(owns, waits)
        if straggler is not None:
            self.message(straggler.describe())
            percent, reason = straggler.slower_percent, straggler.reason
            self._folder.event("straggler", step=step, rank=straggler.rank, slower_percent=percent, reason=reason)
        return {
            "step_ms_by_rank": list(steps),
            "own_ms_by_rank": list(owns),
            "data_wait_ms_by_rank": list(waits),
            "slowest_rank": rank,
        }

    def evaluated(
        self, step: int, samples: int, metrics: Mapping[str, float | list[float]], shown: Sequence[str] = ()
    ) -> None:
        """Writes down an evaluation: numbers, and curves as lists. The user sees the numbers in `shown`, or all."""
        if not self._main:
            return
        self._folder.metrics({"step": step, "samples": samples, **metrics})
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, list)}
        told = [name for name in shown if name in numbers] or list(numbers)
        self.message(f"step {step}  " + "  ".join(f"{name} {numbers[name]:.4f}" for name in told))
        for tracker in self._trackers:
            tracker.log(step, {**numbers, **points_of(metrics)})

    def heads_for(self, step: int) -> None:
        """The step that is shown as the last one, where whoever drives the run has said it anew."""
        self._progress.total = step

    def went_to(self, samples: int) -> None:
        """The run stands at another place of its data than before."""
        self._samples = samples

    def close(self) -> None:
        """Ends the progress line and the trackers."""
        self._progress.close()
        for tracker in self._trackers:
            tracker.close()
        flush_streams()
