"""Records training: progress line, metrics.jsonl and TensorBoard, on the main rank. Other ranks only send timings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Timer
from typing import Any

import torch

from unisono.cluster.lifetime import flush_streams
from unisono.data.loader import MicroBatch
from unisono.engine.previews import write_previews
from unisono.engine.step.flops import FlopMeter
from unisono.engine.step.optimizer_step import StepReport
from unisono.engine.training_run import TrainingRun
from unisono.observe.forecast import Forecast
from unisono.observe.gpu_idle import GpuIdleDetector
from unisono.observe.gpu_load import GpuLoad
from unisono.observe.meter import Meter, device_memory_gib, gpu_memory_gib, host_memory_gib, slowest
from unisono.observe.straggler import StragglerDetector
from unisono.observe.trackers.numbers import curve_summaries
from unisono.observe.trackers.tensorboard import TensorBoardTracker, open_tensorboard
from unisono.observe.training_line import TrainingLine

MAX_RANKS_LISTED = 64
"""Up to this many ranks, metrics.jsonl lists the numbers of each rank; with more, a line would take kilobytes."""
_BY_RANK = ("step_ms", "own_ms", "data_wait_ms", "comm_ms", "compute_ms", "mfu", "gpu_util", "gpu_power_w")
_MEANS = ("comm_ms", "compute_ms", "mfu", "gpu_util", "gpu_power_w")
_SLOW_S = 10.0


class Recorder:
    """Writes the progress line, metrics.jsonl and TensorBoard files of one run."""

    def __init__(self, run: TrainingRun, open_folder: Callable[[], None]) -> None:
        """`open_folder` is called once the first step has succeeded."""
        self._folder, self._settings, self._agreement = run.folder, run.settings.observe, run.rank.agreement
        self._placement = run.components.strategy.placement
        self._main = self._placement.rank == 0
        self._start_step, self._samples = run.start_step, run.components.state.samples
        self._open, self._opened = open_folder, False
        self._progress = TrainingLine(run.length.steps, enabled=self._main)
        self._meter, self._stragglers = Meter(), StragglerDetector()
        self._idle = GpuIdleDetector(can_use_cuda_graph=run.components.recordable)
        self._sharded = run.components.strategy.sharded
        self._flops: FlopMeter | None = None
        self._load: GpuLoad | None = None
        self._status = run.rank.status
        self._tensorboard: TensorBoardTracker | None = None
        self._waiting: list[tuple[int, dict[str, float]]] = []
        self._forecast = Forecast()

    def first_step_done(self) -> None:
        """On its first call, opens the run folder and TensorBoard's files; from then on, records go to files."""
        if self._opened:
            return
        self._opened = True
        self._open()
        self._load = _load_of(self._placement.device)
        self._show_status()
        if self._main:
            self._tensorboard = open_tensorboard(self._settings, self._folder.path, self._start_step)
            for step, numbers in self._waiting:
                self._draw(step, numbers)

    def _show_status(self) -> None:
        """Lets `unisono watch` show this rank's device."""
        if self._status is None:
            return
        device, load = self._placement.device, self._load
        self._status.device, self._status.total_steps = str(device), self._progress.total
        room = {} if device.type != "cuda" else {"mem_total_gib": device_memory_gib(device)}

        def measure() -> dict[str, float]:
            memory = gpu_memory_gib(device)
            peak = {"mem_gib": host_memory_gib() if memory is None else memory}
            return {**({} if load is None else load.newest), **peak, **room}

        self._status.measure = measure

    def measure_flops(self, flops: FlopMeter) -> None:
        """Makes the recorder compute and log `mfu` from the counts of `flops`."""
        self._flops = flops

    def step(self) -> AbstractContextManager[Any]:
        """A context that times an optimizer step."""
        return self._meter.phase("step")

    def not_training(self) -> AbstractContextManager[Any]:
        """A context that times everything that is not training: evaluation, previews, the stall of a save."""
        return self._meter.phase("aside")

    def add_step(self, report: StepReport) -> None:
        """Stores the report of a step on this rank."""
        self._progress.step(report.step)
        forecast = self._forecast.step(report.step, self._progress.total)
        if forecast is not None:
            self.message(forecast)
        self._meter.add("own", report.own_seconds)
        if self._placement.world > 1:
            self._meter.add("comm", report.comm_seconds)
        self._idle.step(waited=report.waited)

    def waiting(self, feed: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Iterates over the feed's micro-batches and measures the time spent waiting for them."""
        while True:
            with self._meter.phase("data"):
                micro = next(feed)
            yield micro

    def message(self, text: str) -> None:
        """Prints a line for the user, on the main rank only."""
        self._progress.message(text) if self._main else None

    @contextmanager
    def message_if_slow(self, text: str) -> Iterator[None]:
        """A context that prints `text` if its body takes a long time, so that users do not mistake it for a hang."""
        timer = Timer(_SLOW_S, self.message, [text])
        timer.daemon = True
        if self._main:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def step_record(self, report: StepReport, num_samples: int, skipped: int) -> dict[str, Any]:
        """Writes the record of a logged step; every rank calls it, because each sends its timings."""
        timing = self._meter.interval(report.samples - self._samples)
        self._samples = report.samples
        record: dict[str, Any] = {
            "step": report.step,
            "epoch": round(report.samples / num_samples, 4),
            "samples": report.samples,
            **({"group": report.group} if report.group else {}),
            "loss": report.loss,
            "lr": report.learning_rate,
            "grad_norm": report.grad_norm,
            "count": report.count,
            **report.metrics,
            **timing,
            "world": self._placement.world,
            "skipped": skipped,
        }
        if timing:  # empty if no rank has done a step since the last record
            numbers = self._device_numbers(timing)
            record |= numbers
            if self._status is not None:
                self._status.numbers = numbers
            if self._placement.world > 1:
                record |= self._over_ranks(numbers, report.step)
        advice = self._idle.advice(timing.get("step_ms", 0.0), timing.get("data_wait_ms", 0.0))
        if advice is not None:
            self.message(advice)
        if not self._main:
            return record
        memory = gpu_memory_gib(self._placement.device)
        record["mem_gib"] = host_memory_gib() if memory is None else memory
        self._folder.metrics(record)
        self._progress.update(**record)
        self._draw(report.step, record)
        return record

    def _device_numbers(self, timing: Mapping[str, float]) -> dict[str, float]:
        """Returns this rank's measurements since the last record: compute time, utilization and power of its device."""
        numbers = dict(timing)
        if "comm_ms" in timing:
            compute = timing["step_ms"] - timing["data_wait_ms"] - timing["comm_ms"]
            numbers["compute_ms"] = max(0.0, compute)
        per_step = None if self._flops is None else self._flops.per_step()
        if per_step is not None and self._flops is not None and self._flops.peak:
            numbers["mfu"] = per_step / (timing["step_ms"] / 1e3 * self._flops.peak)
        return numbers | ({} if self._load is None else self._load.take())

    def _over_ranks(self, numbers: Mapping[str, float], step: int) -> dict[str, Any]:
        """Gathers the numbers of all ranks on the main rank; returns means, numbers by rank, and the slowest rank."""
        mine = {name: round(numbers[name], 3 if name.endswith("_ms") else 4) for name in _BY_RANK if name in numbers}
        ranks = self._agreement.gather(mine)  # exchanged between the hosts, without waiting for the GPU
        if ranks is None:
            return {}
        lists = {name: [each.get(name) for each in ranks] for name in _BY_RANK if any(name in each for each in ranks)}
        means: dict[str, Any] = {}
        for name in _MEANS:
            values = [value for value in lists.get(name, []) if value is not None]
            if values:
                means[name] = sum(values) / len(values)
        waits, computing, owns = ([each[name] for each in ranks] for name in ("data_wait_ms", "compute_ms", "own_ms"))
        # In a sharded model's forward pass, ranks wait for each other inside collectives, and the wait counts as
        # compute time. Only the time before the forward pass can differ between ranks.
        if not self._sharded:
            owns = [compute + wait for compute, wait in zip(computing, waits, strict=True)]
        straggler = self._stragglers.check(owns, waits)
        if straggler is not None:
            self.message(straggler.describe())
            percent, reason = straggler.slower_percent, straggler.reason
            self._folder.event("straggler", step=step, rank=straggler.rank, slower_percent=percent, reason=reason)
        means["slowest_rank"], _ = slowest(owns)
        means["slowest_compute_rank"], _ = slowest(computing)
        if len(ranks) <= MAX_RANKS_LISTED:
            means |= {f"{name}_by_rank": values for name, values in lists.items()}
        return means

    def evaluated(
        self, step: int, samples: int, metrics: Mapping[str, float | list[float]], shown: Sequence[str] = ()
    ) -> None:
        """Writes the record of an evaluation, with curves as lists; prints the numbers in `shown`, or all of them."""
        if not self._main:
            return
        self._folder.metrics({"step": step, "samples": samples, **metrics})
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, list)}
        printed = [name for name in shown if name in numbers] or list(numbers)
        self.message(f"step {step}  " + "  ".join(f"{name} {numbers[name]:.4f}" for name in printed))
        if not self._opened:  # before the first step there are no files
            self._waiting.append((step, {**numbers, **curve_summaries(metrics)}))
        self._draw(step, {**numbers, **curve_summaries(metrics)})

    def _draw(self, step: int, numbers: Mapping[str, Any]) -> None:
        if self._tensorboard is not None:
            self._tensorboard.log(step, numbers)

    def save_previews(self, previews: Mapping[str, Any], step: int) -> None:
        """Writes a recipe's previews to files."""
        if not self._main:
            return
        try:
            for path in write_previews(previews, self._folder.path / "previews", step):
                self._folder.event("preview", step=step, file=path.name)
                if self._tensorboard is not None:
                    self._tensorboard.show(step, path)
        except OSError as error:
            if error.errno is None:  # not a disk error, but an image that the file format cannot store
                raise
            # A full disk must not end the run: as with checkpoints, the next preview may succeed.
            self._folder.event("preview_left_out", step=step, rank=0, error=str(error))
            self.message(f"step {step}: preview skipped, because it cannot be written: {error}")

    def set_total_steps(self, step: int, until: str = "") -> None:
        """Sets the total that the progress line shows, for a caller that drives the run and changes its length.

        `until` says what the total refers to if not to the run, such as "in this epoch".
        """
        self._progress.total, self._progress.until = step, until
        if self._status is not None:
            self._status.total_steps = step

    def moved_to(self, samples: int) -> None:
        """Sets the number of samples consumed, after the run was restored from another checkpoint."""
        self._samples = samples

    def close(self) -> None:
        """Closes the progress line and TensorBoard's file."""
        self._progress.close()
        if self._load is not None:
            self._load.close()
        if self._tensorboard is not None:
            self._tensorboard.show_events(self._folder.path, self._progress.last_step)
            self._tensorboard.close()
        flush_streams()


def _load_of(device: torch.device) -> GpuLoad | None:
    """Samples the load of a GPU; None on the CPU."""
    return GpuLoad(f"GPU-{torch.cuda.get_device_properties(device).uuid}") if device.type == "cuda" else None
