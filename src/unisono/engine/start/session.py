"""Runs one rank from start to finish: joins the other ranks, enters the run folder, builds the run, trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from unisono.checkpoint.examination import Examination
from unisono.checkpoint.find import Damage
from unisono.cluster.agree import Agreement
from unisono.cluster.hangs.diagnosis import Limits
from unisono.cluster.hangs.heartbeat import Heartbeat
from unisono.cluster.hangs.rank_watchdog import Watchdog
from unisono.cluster.process_group import COLLECTIVE_TIMEOUT, join_process_group, leave_process_group
from unisono.cluster.signals import StopRequest
from unisono.config.resolve import Resolved
from unisono.engine.build.device import find_placement, own_stream, switches
from unisono.engine.length import Result
from unisono.engine.memory.cpu_heap import kept_heap
from unisono.engine.rank_context import RankContext
from unisono.engine.recipe import Recipe
from unisono.engine.resume import ChosenCheckpoint, FileChecks, find_checkpoint
from unisono.engine.run_folder.enter import EnteredRun, enter_run_folder
from unisono.engine.run_folder.stored_settings import unfinished
from unisono.engine.start.announce import announce, open_run_folder
from unisono.engine.start.build_run import build_run
from unisono.engine.start.crash import note_crash
from unisono.engine.start.prepare import StoppedBeforeTraining
from unisono.engine.start.rank_start import RankStart
from unisono.engine.start.registry import importable_name
from unisono.engine.trainer import Trainer
from unisono.engine.training_run import TrainingRun
from unisono.faults import Fault, Injector, parse
from unisono.observe.folder import append_event
from unisono.observe.side_process.parent import SideProcesses
from unisono.observe.status_line import print_line
from unisono.observe.trackers.named import named
from unisono.observe.trackers.processes import start_trackers
from unisono.observe.watch.rank_status import RankStatus
from unisono.settings import Settings

T = TypeVar("T")
TrainerT = TypeVar("TrainerT", bound=Trainer)


TrainerFactory = Callable[[TrainingRun, Callable[[], None]], Trainer]


def run_session(
    recipe_class: type[Recipe], resolved: Resolved, start: RankStart, make_trainer: TrainerFactory = Trainer
) -> Result:
    """Trains on this rank; every rank of the run calls it."""
    settings, world = resolved.build(Settings), start.world
    heartbeat = Heartbeat(world.rank, start.job_folder)
    limits = Limits(settings.launch.hang_timeout, settings.launch.start_timeout)
    folder: Path | None = None
    with Watchdog(heartbeat, world, limits) as watchdog:
        start = join_ranks(start, settings, limits)
        watchdog.joined()
        try:
            with (
                StopRequest(world.launcher, start.job_folder) as stop,
                closing(Session.enter(recipe_class, resolved, start, stop, heartbeat)) as session,
            ):
                session.note_unfinished_run()
                folder = path = watchdog.run_folder = session.folder
                watchdog.record_event = lambda event, details: append_event(path, event, **details)
                result = session.run(make_trainer)
        except BaseException as error:
            note_crash(error, world, heartbeat.last, folder, start.job_folder)
            if world.size == 1:  # with several ranks, leaving could wait forever for a peer that has died
                leave_process_group()
            raise
        leave_process_group(together=world.launcher in ("slurm", "mpi"))
    return result


def join_ranks(start: RankStart, settings: Settings, limits: Limits) -> RankStart:
    """Creates the process group; returns `start` with notes for the user once all ranks have joined."""
    backend = join_process_group(
        start.world,
        find_placement(start.world, settings).device,
        alone=settings.parallel.strategy in ("ddp", "fsdp", "hsdp"),
        timeout_s=limits.start_s or COLLECTIVE_TIMEOUT.total_seconds(),
        backend=settings.launch.backend,
    )
    return replace(start, remarks=[*start.remarks, backend.warning]) if backend.warning else start


class Session:
    """One rank's part in a run: `enter` its folder, `build` a trainer, `run` it to the end."""

    def __init__(self, rank: RankContext, start: RankStart, entered: EnteredRun) -> None:
        self._status = RankStatus(entered.folder.path, rank.heartbeat, start.world.size)
        self._rank, self._start, self._entered = replace(rank, status=self._status), start, entered
        self._remarks = [*start.remarks, *entered.remarks, *_remarks_on_changes(entered)]
        self._beside: list[SideProcesses] = []
        self.ended = False
        """Whether the run is over: nothing restarts it, so it may wait for its trackers."""

    @classmethod
    def enter(
        cls, recipe_class: type[Recipe], resolved: Resolved, start: RankStart, stop: StopRequest, heartbeat: Heartbeat
    ) -> Session:
        """Locks the run folder and determines the run's settings; every rank calls it."""
        rank = RankContext(start.world, Agreement(alone=start.world.size == 1), stop, heartbeat)
        entered = enter_run_folder(recipe_class, resolved, rank, is_locked=start.folder_is_locked)
        path, number = entered.folder.path, start.world.rank

        def note_fault(fault: Fault, step: int) -> None:
            append_event(path, "injected", step=step, rank=number, fault=fault.text)

        heartbeat.injector = Injector(parse(entered.settings.run.inject), number, Path(path, ".injected"), note_fault)
        return cls(rank, start, entered)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._entered.folder.path

    def run(self, make_trainer: TrainerFactory = Trainer) -> Result:
        """Trains from the newest checkpoint to the end."""
        with self.computing():
            try:
                trainer = self.build(make_trainer)
            except StoppedBeforeTraining as stopped:
                if self._rank.world.is_main:
                    print_line(str(stopped))
                return Result(self.folder, "stopped", stopped.step, {})
            result = trainer.train()
            self._entered.folder.event(result.status, step=result.step)
            self.ended = True
            return result

    def note_unfinished_run(self) -> None:
        """If the run folder is new, notes that an unfinished run with the same settings could be continued."""
        entered = self._entered
        if entered.record is None:
            classes = (Settings, entered.recipe_class.Config)
            self._remarks += self.main_decides(lambda: unfinished(entered.resolved, entered.recipe_name, classes))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A context for everything that computes: sets torch's global switches and keeps freed CPU memory."""
        settings = self._entered.settings
        with switches(settings, many_shapes=self._entered.recipe_class.many_shapes):
            device = find_placement(self._start.world, settings).device
            with own_stream(settings, device), kept_heap(device):
                yield

    def close(self) -> None:
        """Ends the run's side processes, and unlocks the run folder."""
        if self._beside:
            self._rank.heartbeat.at("prepare", self._rank.heartbeat.last.step)  # hang detection ignores the wait
        for processes in self._beside:
            processes.close(ended=self.ended)
        self._status.close()
        self._entered.folder.close()

    def main_decides(self, decide: Callable[[], T]) -> T:
        """Calls `decide` on the main rank; returns its result, or raises its UserError, on every rank."""
        return self._rank.main_decides(decide)

    def named_checkpoint(self, path: str) -> Path:
        """Returns the checkpoint at a path that the user named: the path, or the newest in that folder or run."""
        examination = Examination(self._rank.world.rank, self._rank.world.size, self._rank.agreement.all_gather)

        def find(damage: Damage) -> ChosenCheckpoint:
            checks = FileChecks(damage, examination.contents)
            return find_checkpoint(path, self.folder, self._entered.recipe_name, checks=checks)

        chosen = self._rank.main_decides_with(examination.damage, find)
        assert chosen.path is not None
        return chosen.path

    def build(self, make_trainer: Callable[[TrainingRun, Callable[[], None]], TrainerT]) -> TrainerT:
        """Builds and announces the run and returns its trainer; every rank calls it.

        Raises StoppedBeforeTraining if a signal came during prepare().
        """
        self._status.start()
        rank, world = self._rank, self._start.world
        run = build_run(rank, self._entered, self._start.requested_devices)
        announce(run, earlier_remarks=self._remarks)

        def after_first_step() -> None:
            self._start.trained.set()
            if world.is_main:
                open_run_folder(run)
                self._beside = _start_beside(run.settings, self.folder)

        return make_trainer(run, after_first_step)


def _start_beside(settings: Settings, folder: Path) -> list[SideProcesses]:
    """Starts the side processes: the trackers, and the copy to object storage."""
    observe, save = settings.observe, settings.save
    trackers = start_trackers(
        named(observe.track),
        folder,
        print_line,
        project=observe.track_project,
        offline=observe.track_offline,
        timeout_s=observe.track_timeout,
    )
    mirror = SideProcesses(folder, print_line, event="mirror", timeout_s=save.mirror_timeout)
    if save.mirror is not None:
        order = {"folder": str(folder), "address": save.mirror, "keep_last": save.keep_last}
        mirror.start("mirror", "unisono.mirror.process", order)
    return [trackers, mirror]


def _remarks_on_changes(entered: EnteredRun) -> list[str]:
    """Returns notes on the differences between this start of the run and its last one."""
    remarks = []
    if entered.changed:
        changes = (f"{name} {old} → {new}" for name, (old, new) in entered.changed.items())
        remarks.append(f"since its last start: {', '.join(changes)}")
    for name in entered.forgotten_secrets:
        remarks.append(f"{name} is a secret, which run.json does not store; pass it again if the run needs it")
    recipe, recipe_before = importable_name(entered.recipe_class), (entered.record or {}).get("recipe_from")
    if recipe_before not in (None, recipe):
        remarks.append(f"this run's recipe was {recipe_before}, now it is {recipe}")
    return remarks
