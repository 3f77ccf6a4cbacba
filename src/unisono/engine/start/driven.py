"""A run that its caller drives: the user's own loop decides when to train, evaluate and save.

The trainer still runs the steps and handles faults; this module calls its methods one by one. Every rank must make the
same calls. A rank may spend any amount of time between two calls: hang detection ignores it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from unisono.checkpoint.aside import remark_on_asides, set_aside_after
from unisono.checkpoint.contents import contents_of
from unisono.cluster.hangs.diagnosis import Limits
from unisono.cluster.hangs.heartbeat import Heartbeat
from unisono.cluster.hangs.rank_watchdog import Watchdog
from unisono.cluster.signals import BetweenCalls, StopRequest
from unisono.config.resolve import Resolved
from unisono.engine.batch import BatchPlan
from unisono.engine.checks import check_settings
from unisono.engine.length import Length
from unisono.engine.recipe import Recipe
from unisono.engine.resume import extra_of, read_state, restore, tensors_of
from unisono.engine.start.rank_start import RankStart
from unisono.engine.start.session import Session, join_ranks
from unisono.engine.trainer import Trainer
from unisono.errors import TrainingFailed
from unisono.observe.folder import append_event
from unisono.settings import Settings

T = TypeVar("T")


class DrivenTrainer(Trainer):
    """A trainer whose caller trains an epoch or some steps at a time."""

    def train_epoch(self, *, keep_reading: bool) -> bool:
        """Trains to the end of the current epoch; returns True if a signal stopped training early.

        `keep_reading`: loader workers stay alive and prefetch the next epoch.
        """
        num, epoch = self._order.num_samples, self.state.samples // self._order.num_samples
        last = None if self.last_epoch is None else max(self.last_epoch, epoch + 1) * num
        return self._train_to((epoch + 1) * num, keep_reading, last)

    def train_steps(self, steps: int) -> bool:
        """Trains for `steps` steps; returns True if a signal stopped training early."""
        return self._train_to(self._strides.after(self.state.samples, steps), keep_reading=True)

    last_epoch: int | None = None
    """Number of the last epoch that the caller will train, if known: the progress line then shows the whole run."""

    def _train_to(self, end: int, keep_reading: bool, last: int | None = None) -> bool:
        self.length = Length(end, self._steps_at(end))
        # Only the user's loop knows whether more epochs follow.
        self._recorder.set_total_steps(self._steps_at(last or end), until="" if last else "in this epoch")
        with self._finishing_saves():
            try:
                if not self._feed.is_reading:
                    self._find_micro_batch()
                    self._feed.begin(self._sizer.plan)
                stopped = self._loop()
            except BaseException:
                keep_reading = False
                raise
            finally:
                if not keep_reading:
                    self._feed.close()
            self._recorder.first_step_done()
            self._report_saves()
        return stopped

    def _steps_at(self, samples: int) -> int:
        return self.state.step + self._strides.between(self.state.samples, samples)

    def evaluate(self) -> dict[str, float | list[float]] | None:
        """Evaluates now and returns the metrics; None without evaluation data, or if a signal interrupted it."""
        self._settle()
        with self._finishing_saves(), self._recorder.not_training(), self.components.averaged():
            return None if self._evaluation is None else self._evaluate()

    def find_micro_batch(self) -> int:
        """Finds by trial the largest micro-batch that fits on every device (micro_batch auto)."""
        with self._finishing_saves():
            self._find_micro_batch()
        return self._sizer.plan.micro_batch

    def use_micro_batch(self, size: int) -> BatchPlan:
        """Limits the micro-batch to `size` samples per device from now on; the effective batch does not change.

        If the run has already run out of memory, a size larger than the current one is ignored.
        """
        plan = self._sizer.plan
        most = plan.micro_batch if self.state.memory_failures else plan.share
        self._sizer.plan = replace(plan, micro_batch=min(size, most))
        self._feed.close()  # prefetched micro-batches have the old size
        return self._sizer.plan

    def keep(self) -> None:
        """Saves a checkpoint of this step in the run folder."""
        self._save()
        self._report_saves()

    def finish_saves(self) -> None:
        """Waits until all checkpoints are on disk."""
        self._report_saves(wait=True)

    def save_to(self, folder: Path) -> Path:
        """Saves a checkpoint in another folder and waits for it; deletes this run's older checkpoints there."""
        self._settle()
        self._report_saves(wait=True)  # waits for a save in progress, because all saves use the same process group
        step = self.state.step
        if self._main:
            moved = set_aside_after(folder, step, self._run.identity, {})
            for aside, why in moved:
                self._recorder.message(f"set aside as {aside}: {why}")
            if moved and (remark := remark_on_asides(folder)) is not None:
                self._recorder.message(remark)
        # The run may have saved this step there before, and then gone back to an earlier checkpoint.
        saver = self._make_saver(folder, keep_last=1, asynchronous=False, replaces=True)
        with self._recorder.not_training():
            self.components.strategy.share_buffers()
            saver.save(step, tensors_of(self.components), extra_of(self.components))
        [result] = saver.wait()
        if result.path is None:
            raise TrainingFailed(f"no checkpoint could be saved in {folder}: {result.error}")
        return result.path

    def continue_from(self, checkpoint: Path) -> None:
        """Restores a checkpoint: weights, optimizer state and position in the data."""
        self._settle()
        self._report_saves(wait=True)
        self._feed.close()
        contents = contents_of(checkpoint)
        [group] = self.components.groups  # a driven recipe declares no groups, so there is exactly one
        with group.optimizer.without_state_missing_in(contents.shapes):
            restore(contents, read_state(checkpoint), self.components, self._run.save_group)
        self.state.num_samples, self._saved_step = self._order.data_size or self._order.num_samples, -1
        self.state.blocks = self._run.datasets.blocks
        self._sizer.plan = replace(self._sizer.plan, global_batch=self.state.global_batch)
        self._recorder.moved_to(self.state.samples)
        if self._main:
            self._folder.rewind_metrics(self.state.step)
            set_aside_after(self._run.entered.checkpoints, self.state.step, self._run.identity, {})
            self._folder.event("went_to", step=self.state.step, checkpoint=str(checkpoint))

    @property
    def epoch_samples(self) -> int:
        """Number of samples in an epoch."""
        return self._order.num_samples

    def close(self, status: str) -> None:
        """Ends the run: waits for its saves, ends its loader workers and the progress line, and records `status`."""
        self._settle()
        self._feed.close()
        self._report_saves(wait=True)
        self._recorder.close()
        if self.state.step > 0:  # before the first step there is no folder
            self._folder.event(status, step=self.state.step)


class DrivenRun:
    """One rank's part in a run that its caller drives; it starts exactly as under `unisono train`."""

    trainer: DrivenTrainer

    def __init__(self, recipe_class: type[Recipe], resolved: Resolved, start: RankStart) -> None:
        settings = resolved.build(Settings)
        check_settings(settings)
        self._world, self._start = start.world, start
        self.on_signal_between: Callable[[], bool] = lambda: False
        """Called on a stop signal while the caller's own code runs; returns whether it handled the signal."""
        self._open = ExitStack()
        self._heartbeat = Heartbeat(start.world.rank, start.job_folder)
        try:
            self._begin(recipe_class, resolved, start, settings)
        except BaseException:
            self._open.close()
            raise

    def _begin(self, recipe_class: type[Recipe], resolved: Resolved, start: RankStart, settings: Settings) -> None:
        limits = Limits(settings.launch.hang_timeout, settings.launch.start_timeout)
        watchdog = self._open.enter_context(Watchdog(self._heartbeat, self._world, limits))
        if not dist.is_initialized():  # successive runs of one process share the process group
            start = join_ranks(start, settings, limits)
        watchdog.joined()
        self._stop = StopRequest(self._world.launcher, start.job_folder)
        me = weakref.ref(self)  # the signal handler must not keep an unused run alive
        self._open.enter_context(
            BetweenCalls(self._stop, lambda: (run := me()) is not None and run.on_signal_between())
        )
        with self._stop:
            self._session = Session.enter(recipe_class, resolved, start, self._stop, self._heartbeat)
            self._open.callback(self._session.close)
            self.folder = watchdog.run_folder = self._session.folder
            watchdog.record_event = lambda what, details: append_event(self.folder, what, **details)
            with self._session.computing():
                self.trainer = self._session.build(DrivenTrainer)
        self._rest()

    def do(self, work: Callable[[DrivenTrainer], T]) -> T:
        """Calls `work` with the trainer, as in a run: signals become stop requests, torch's global switches are set."""
        with self._stop, self._session.computing():
            try:
                return work(self.trainer)
            except Exception as error:
                if not isinstance(error, TrainingFailed):
                    error.add_note(
                        f"on rank {self._world.rank}, in {self._heartbeat.last.phase} of the run {self.folder}"
                    )
                raise
            finally:
                self._rest()

    @property
    def stop_requested(self) -> str | None:
        """The name of the signal that asked this rank to stop; None if there was none."""
        return self._stop.requested

    def checkpoint_at(self, path: str) -> Path:
        """Returns the checkpoint at `path`, or the newest one in it; the same on every rank."""
        return self._session.named_checkpoint(path)

    def decide(self, decide: Callable[[], T]) -> T:
        """Calls `decide` on the main rank; returns its result, or raises its UserError, on every rank."""
        return self._session.main_decides(decide)

    def close(self, status: str = "done") -> None:
        """Ends the run with the status done, stopped or failed; the process group stays for the next run."""
        with self._open:
            self.do(lambda trainer: trainer.close(status))
            self._session.ended = True

    def _rest(self) -> None:
        # Hang detection has no limit for this phase: the caller's own code may run for any amount of time.
        step = self.trainer.state.step if hasattr(self, "trainer") else 0
        self._heartbeat.at("prepare", step)
