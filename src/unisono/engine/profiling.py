"""Profiles some steps of a run (`--profile`), on every rank.

A `ProfilingRecorder` works like a `Recorder`, and also starts the profiler before the first profiled step and writes
its files after the last profiled step. Without `--profile`, a run uses a plain `Recorder`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from unisono.atomic_files import write_atomically
from unisono.data.loader import MicroBatch
from unisono.engine.recorder import Recorder
from unisono.engine.step.optimizer_step import StepReport
from unisono.engine.step.out_of_memory import OutOfMemoryTogether
from unisono.engine.training_run import TrainingRun
from unisono.faults import Injector
from unisono.formatting import describe_exception
from unisono.observe.profile.files import SUMMARY, SUMMARY_TEXT, WAITS, new_folder, steps_folder, steps_text, write_json
from unisono.observe.profile.pictures import waits_picture
from unisono.observe.profile.session import ProfileSession
from unisono.observe.profile.spec import ProfileSpec, parse_profile
from unisono.observe.profile.summary import as_text, rank_summary, summary
from unisono.observe.profile.trace import Trace
from unisono.typed_paths import as_typed

_WARM_UP, _RECORDING = 3, 5  # warm-up steps before the profile; additional steps in which CUDA graphs are recorded


def make_recorder(run: TrainingRun, open_folder: Callable[[], None]) -> Recorder:
    """Returns the recorder of a run: with a profile if `--profile` is set."""
    spec = parse_profile(run.settings.observe.profile)
    return Recorder(run, open_folder) if spec is None else ProfilingRecorder(run, open_folder, spec)


class ProfilingRecorder(Recorder):
    """A recorder that profiles some steps."""

    def __init__(self, run: TrainingRun, open_folder: Callable[[], None], spec: ProfileSpec) -> None:
        super().__init__(run, open_folder)
        self._rank, self._state, self._spec, self._run = run.rank, run.components.state, spec, run
        self._first = first_step(spec, run)
        self._last = self._first + spec.steps - 1
        self._session: ProfileSession | None = None
        self._running = False
        self._begins: list[float] = []  # start times of the last steps before the profile
        self._comm_s: dict[int, float] = {}  # seconds spent waiting for other ranks, by step
        self._stopped_after = 0  # the last profiled step
        self._where = ""

    def step(self) -> AbstractContextManager[Any]:
        """A context that times an optimizer step, and profiles it if it is one of the steps to profile."""
        number = self._state.step + 1
        if self._session is None and number == self._first:
            self._start()
        if self._session is None and number < self._first:
            self._begins = [*self._begins[-3:], time.perf_counter()]
        return self._profiled(number) if self._running else super().step()

    def waiting(self, feed: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Iterates over the feed's micro-batches; in a profile, the phase `data` is exactly the wait for them."""
        for micro in super().waiting(feed):
            if self._running and self._session is not None:
                self._session.phase("begin")
            yield micro

    def add_step(self, report: StepReport) -> None:
        """Stores the report of a step; the report of the last profiled step completes the profile."""
        super().add_step(report)
        self._comm_s = {step: wait for step, wait in self._comm_s.items() if step >= self._first}
        self._comm_s[report.step] = report.comm_seconds
        if self._opened:
            self._write_if_complete(report.step)

    def first_step_done(self) -> None:
        """On its first call, opens the run folder, and writes the profile if only the first step was profiled."""
        super().first_step_done()
        self._write_if_complete(max(self._comm_s, default=0))

    def close(self) -> None:
        """Writes the profile if the run ended before its last profiled step, and prints the folder's path."""
        if self._running:
            self._stop(self._state.step)
        if self._session is not None and self._stopped_after:
            self._write(together=sys.exception() is None)  # after an error, other ranks may not get here
        super().close()
        step = self._state.step
        if self._where and step > self._last:
            self.message(f"profile of {steps_text(self._first, self._last)}: {self._where}")
        elif not self._where and step < self._first:
            self.message(f"profile: the run ended after step {step}, before step {self._first}; nothing was profiled")

    def not_training(self) -> AbstractContextManager[Any]:
        """A context that times everything that is not training; an error there also ends the profiler."""
        return self._stopping_on_error() if self._running else super().not_training()

    @contextmanager
    def _stopping_on_error(self) -> Iterator[None]:
        try:
            with super().not_training():
                yield
        except BaseException:
            self._abandon()
            raise

    @contextmanager
    def _profiled(self, number: int) -> Iterator[None]:
        assert self._session is not None
        heartbeat = self._rank.heartbeat
        injector = heartbeat.injector
        heartbeat.injector = _PhaseMarks(injector, self._session)
        try:
            with self._session.step(number), super().step():
                yield
        except OutOfMemoryTogether:  # the step is repeated in smaller micro-batches, and profiled again
            raise
        except BaseException:
            self._abandon()
            raise
        finally:
            heartbeat.injector = injector
        if number >= min(self._last, self._run.length.steps):
            self._stop(number)

    def _start(self) -> None:
        session = ProfileSession(self._placement.device, memory=self._spec.memory)
        self._begins = [*self._begins, time.perf_counter()]
        problem = ""
        try:
            session.start()
        except RuntimeError as error:  # for instance, the caller of unisono.train() is already profiling
            problem = describe_exception(error)
        # Ranks write a profile together, so they need to agree on whether there is one.
        problems = self._agreement.all_gather(problem)
        if any(problems):
            with suppress(RuntimeError):
                session.stop()
            first = next(filter(None, problems))
            self.message(f"profile: the profiler cannot be started ({first}); training continues")
            return
        self._session, self._running = session, True

    def _stop(self, number: int) -> None:
        assert self._session is not None
        with self.not_training():
            self._running = False
            self._session.stop()
        self._stopped_after = number

    def _abandon(self) -> None:
        """Ends the profiler after an error, so that a later attempt in this process can start it again."""
        self._running = False
        if self._session is not None:
            with suppress(RuntimeError):
                self._session.stop()
            self._session = None

    def _write_if_complete(self, reported: int) -> None:
        if self._session is not None and self._stopped_after and reported >= self._stopped_after:
            self._write(together=True)

    def _write(self, *, together: bool) -> None:
        """Writes this rank's files and, on the main rank, the summary (of all ranks, with `together`)."""
        assert self._session is not None
        session, self._session, last = self._session, None, self._stopped_after
        self._last = last
        with self.not_training():
            self._rank.heartbeat.at("profile", last)
            name = self._new_folder(steps_folder(self._first, last), together=together)
            if name is None:
                return
            folder = self._folder.path / name
            trace, mine, memory = self._write_rank(session, folder)
            ranks = self._agreement.gather(mine) if together else [mine]
            if self._main and trace is not None:
                complete = [each for each in ranks or [] if each is not None]
                self._write_summary(folder, trace, complete, memory, together=together)

    def _new_folder(self, name: str, *, together: bool) -> str | None:
        """Creates the folder on the main rank; returns its path in the run folder, on every rank if `together`."""
        found: tuple[str | None, str] = (None, "")
        if self._main:
            try:
                found = str(new_folder(self._folder.path, name).relative_to(self._folder.path)), ""
            except OSError as error:
                found = None, describe_exception(error)
        if together:
            found = self._agreement.broadcast(found)
        if found[0] is None and found[1]:
            self.message(f"profile: its folder cannot be created ({found[1]}); training continues")
        return found[0]

    def _write_rank(
        self, session: ProfileSession, folder: Path
    ) -> tuple[Trace | None, dict[str, Any] | None, dict[str, Any] | None]:
        number = self._placement.rank
        try:
            trace, memory = session.write(folder, number)
            waits = [wait for step, wait in self._comm_s.items() if self._first <= step <= self._last]
            comm_ms = 1e3 * statistics.fmean(waits) if waits and self._placement.world > 1 else None
            return trace, rank_summary(trace, number, comm_ms), memory
        except Exception as error:  # a full disk, or a trace that cannot be read, must not end the run
            text = f"rank {number}'s trace cannot be written ({describe_exception(error)})"
            self.message(f"profile: {text}; training continues")
            return None, None, None

    def _write_summary(
        self, folder: Path, trace: Trace, ranks: list[dict[str, Any]], memory: dict[str, Any] | None, *, together: bool
    ) -> None:
        failed = not together and self._placement.world > 1
        intervals = [1e3 * (after - before) for before, after in zip(self._begins, self._begins[1:], strict=False)]
        content = summary(
            trace,
            ranks,
            world=self._placement.world,
            device=_name_of(self._placement.device),
            unprofiled_step_ms=round(statistics.median(intervals), 4) if intervals else None,
            memory=memory,
            notes=["The run failed, so only rank 0 could write its profile."] if failed else [],
        )
        try:
            write_json(folder / SUMMARY, content)
            write_atomically(folder / SUMMARY_TEXT, as_text(content))
            write_atomically(folder / WAITS, waits_picture(ranks))
        except OSError as error:
            self.message(f"profile: the summary cannot be written ({describe_exception(error)}); training continues")
            return
        relative = folder.relative_to(self._folder.path).as_posix()
        self._folder.event("profile", step=self._last, rank=0, first=self._first, last=self._last, folder=relative)
        self._where = f"{as_typed(folder)} (tables: {SUMMARY_TEXT}; traces for ui.perfetto.dev: rank_N.json.gz)"
        self.message(f"profiled {steps_text(self._first, self._last)}: {self._where}")


class _PhaseMarks(Injector):
    """Marks the phases of a step in the trace. The heartbeat calls it at every phase, as it calls the injector."""

    def __init__(self, injector: Injector, session: ProfileSession) -> None:
        super().__init__()
        self._injector, self._session = injector, session

    def at(self, phase: str, step: int, saved: Path | None = None) -> None:
        """Begins a phase in the trace, then triggers the faults of this phase."""
        self._session.phase(phase)
        self._injector.at(phase, step, saved)

    def makes_loss_nan(self, step: int) -> bool:
        """Whether this rank's loss in `step` has to become NaN."""
        return self._injector.makes_loss_nan(step)


def first_step(spec: ProfileSpec, run: TrainingRun) -> int:
    """Returns the first step to profile: the user's choice, or a step after the warm-up, earlier in a short run."""
    if spec.start is not None:
        return spec.start
    done, guarded = run.start_step, max(0, run.settings.batch.guard_steps)
    warm_up = _WARM_UP + (guarded if run.components.strategy.guardable else 0)
    warm_up += _RECORDING if run.components.captures else 0
    latest = run.length.steps - spec.steps + 1
    return max(min(done + warm_up + 1, latest), min(done + 2, run.length.steps), 1)


def _name_of(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
