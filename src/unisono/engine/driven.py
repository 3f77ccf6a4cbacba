"""A run whose caller says when to train, to evaluate and to save.

The loop, the step and the faults are the trainer's; what is here are its pieces, one by one, for a loop of the user's
own. Every rank makes the same calls. Between them a rank may take its time: nobody takes that for a hang.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from unisono.checkpoint.commit import set_aside_after
from unisono.checkpoint.load import describe
from unisono.checkpoint.save import Saver
from unisono.cluster.hang import Limits
from unisono.cluster.processes import PATIENCE, join
from unisono.cluster.pulse import Pulse
from unisono.cluster.signals import StopRequest
from unisono.cluster.watchdog import Watchdog
from unisono.config.resolve import Resolved
from unisono.engine.checks import check_settings
from unisono.engine.length import Length
from unisono.engine.placement import find_placement
from unisono.engine.recipe import Recipe
from unisono.engine.resume import extra_of, restore, tensors_of
from unisono.engine.session import Session, Start
from unisono.engine.trainer import Trainer
from unisono.errors import TrainingFailed
from unisono.observe.folder import append_event
from unisono.settings import Settings

T = TypeVar("T")


class DrivenTrainer(Trainer):
    """A trainer whose pieces are called one by one."""

    def train_epoch(self, *, keep_reading: bool) -> bool:
        """Trains to the end of the epoch that the run is in; True when a signal ended it earlier.

        `keep_reading`: loader workers stay, and read the next epoch ahead.
        """
        num = self._order.num_samples
        return self._train_to((self.state.samples // num + 1) * num, keep_reading)

    def train_steps(self, steps: int) -> bool:
        """Trains so many steps; True when a signal ended it earlier."""
        return self._train_to(self._strides.after(self.state.samples, steps), keep_reading=True)

    def _train_to(self, end: int, keep_reading: bool) -> bool:
        self.length = Length(end, self.state.step + self._strides.between(self.state.samples, end))
        self._watch.heads_for(self.length.steps)
        with self._ending_well():
            try:
                if not self._feed.is_reading:
                    self._find_micro_batch()
                    self._feed.begin(self._sizing.plan)
                stopped = self._loop()
            except BaseException:
                keep_reading = False
                raise
            finally:
                if not keep_reading:
                    self._feed.close()
            self._watch.first_step_done()
            self._report_saves()
        return stopped

    def evaluate(self) -> dict[str, float | list[float]] | None:
        """The metrics of the evaluation data now; None without such data, or when a signal came before it was over."""
        self._settle()
        with self._ending_well(), self._watch.aside(), self._averaged():
            return None if self._evaluation is None else self._evaluate()

    def find_micro_batch(self) -> int:
        """The most samples at once that fit on every device (micro_batch auto), found by trying."""
        with self._ending_well():
            self._find_micro_batch()
        return self._sizing.plan.micro_batch

    def keep(self) -> None:
        """Saves a checkpoint of this step into the run's folder."""
        self._save()
        self._report_saves()

    def finish_saves(self) -> None:
        """Returns when all that was saved is on disk."""
        self._report_saves(wait=True)

    def save_to(self, folder: Path) -> Path:
        """Saves a checkpoint into another folder, as the one of this run that it holds; returns when it is there."""
        self._settle()
        self._report_saves(wait=True)  # one save at a time: they share a group
        step, place = self.state.step, self.parts.strategy.place
        if self._main:
            for aside, why in set_aside_after(folder, step, self._identity, {}):
                self._watch.message(f"set aside as {aside}: {why}")
        saver = Saver(
            folder,
            rank=place.rank,
            world=place.world,
            group=self._save_group,
            keep_last=1,
            asynchronous=False,
            identity=self._identity,
        )
        with self._watch.aside():
            self.parts.strategy.share_buffers()
            saver.save(step, tensors_of(self.parts), extra_of(self.parts))
        [result] = saver.wait()
        if result.path is None:
            raise TrainingFailed(f"no checkpoint could be saved in {folder}: {result.error}")
        return result.path

    def go_on_from(self, checkpoint: Path) -> None:
        """Takes up a checkpoint: weights, optimizer and the place in the data are as they were when it was saved."""
        self._settle()
        self._report_saves(wait=True)
        self._feed.close()
        self.parts.updater.drop_all_but(describe(checkpoint))
        restore(checkpoint, self.parts, self._save_group)
        self.state.num_samples, self._saved_step = self._order.num_samples, -1
        self._sizing.plan = replace(self._sizing.plan, global_batch=self.state.global_batch)
        self._watch.went_to(self.state.samples)
        if self._main:
            self._folder.rewind_metrics(self.state.step)
            set_aside_after(self._folder.path / "checkpoints", self.state.step, self._identity, {})
            self._folder.event("went_to", step=self.state.step, checkpoint=str(checkpoint))

    @property
    def epoch_samples(self) -> int:
        """How many samples an epoch has."""
        return self._order.num_samples

    def close(self, status: str) -> None:
        """Ends a run that was driven: waits for its saves, ends its workers and lines, and notes how it ended."""
        self._settle()
        self._feed.close()
        self._report_saves(wait=True)
        self._watch.close()
        if self.state.step > 0:  # before that there is no folder
            self._folder.event(status, step=self.state.step)


class DrivenRun:
    """One rank's part in a run that its caller drives; from the first line on as `unisono train` would begin it."""

    trainer: DrivenTrainer

    def __init__(self, kind: type[Recipe], resolved: Resolved, start: Start) -> None:
        settings = resolved.build(Settings)
        check_settings(settings)
        self._world, self._start = start.world, start
        self._open = ExitStack()
        self._pulse = Pulse(start.world.rank, start.job_folder)
        try:
            self._begin(kind, resolved, start, settings)
        except BaseException:
            self._open.close()
            raise

    def _begin(self, kind: type[Recipe], resolved: Resolved, start: Start, settings: Settings) -> None:
        limits = Limits(settings.launch.hang_timeout, settings.launch.start_timeout)
        watchdog = self._open.enter_context(Watchdog(self._pulse, self._world, limits))
        place = find_placement(self._world, settings)
        group = settings.parallel.strategy in ("ddp", "fsdp")
        if not dist.is_initialized():  # several runs of one process, one after the other, share the ranks' group
            seconds = limits.start_s or PATIENCE.total_seconds()
            gloo = settings.launch.backend == "gloo"
            join(self._world, place.device, alone=group, timeout_s=seconds, gloo=gloo)
        watchdog.joined()
        self._stop = StopRequest(self._world.launcher, start.job_folder)
        with self._stop:
            self._session = Session(kind, resolved, start, self._stop, self._pulse)
            self._open.callback(self._session.close)
            self.folder = watchdog.run_folder = self._session.folder
            watchdog.note = lambda what, details: append_event(self.folder, what, **details)
            with self._session.computing():
                trainer = self._session.build(DrivenTrainer)
        assert isinstance(trainer, DrivenTrainer)  # nothing is prepared, so nobody can have stopped that
        self.trainer = trainer
        self._rest()

    def do(self, work: Callable[[DrivenTrainer], T]) -> T:
        """Lets the trainer work, as a run does: signals are requests, torch's switches as the settings want them."""
        with self._stop, self._session.computing():
            try:
                return work(self.trainer)
            except Exception as error:
                if not isinstance(error, TrainingFailed):
                    error.add_note(f"on rank {self._world.rank}, in {self._pulse.last.phase} of the run {self.folder}")
                raise
            finally:
                self._rest()

    @property
    def stop_requested(self) -> str | None:
        """The signal that asked this rank to stop."""
        return self._stop.requested

    def checkpoint_at(self, path: str) -> Path:
        """The checkpoint that a path names; the same on every rank."""
        return self._session.named_checkpoint(path)

    def decide(self, decide: Callable[[], T]) -> T:
        """What the main rank finds out, or its mistake, on every rank."""
        return self._session.main_decides(decide)

    def close(self, status: str = "done") -> None:
        """Ends the run, which is done, stopped or failed; the ranks' group stays, for the next one."""
        with self._open:
            self.do(lambda trainer: trainer.close(status))

    def _rest(self) -> None:
        # As while a recipe prepares: the caller's own code may take as long as it likes.
        step = self.trainer.state.step if hasattr(self, "trainer") else 0
        self._pulse.at("prepare", step)
