"""What one rank does from its first to its last line: settings, placement, checkpoint, training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from unisono.checkpoint.commit import read_best, set_aside_after
from unisono.checkpoint.find import list_steps, read_extra
from unisono.checkpoint.manifest import read_manifest
from unisono.cluster.agree import Agreement
from unisono.cluster.environment import World
from unisono.cluster.hang import Limits
from unisono.cluster.outcome import in_words
from unisono.cluster.processes import PATIENCE, join, leave
from unisono.cluster.pulse import Pulse
from unisono.cluster.shared_folder import check_shared
from unisono.cluster.signals import StopRequest
from unisono.cluster.watchdog import Watchdog
from unisono.config.resolve import Resolved
from unisono.data.bits import Purpose, key_of
from unisono.data.seeding import seed_everything
from unisono.engine.batch import BatchPlan, plan_batch, with_micro_batch
from unisono.engine.build import Parts, build_dataset, build_parts
from unisono.engine.checks import check_settings
from unisono.engine.evaluate import Evaluation
from unisono.engine.folders import default_folder, print_line, read_own, versions
from unisono.engine.heap import kept_heap
from unisono.engine.history import changed, continue_run, record_of, unfinished
from unisono.engine.length import Length, Result
from unisono.engine.memory import remembered
from unisono.engine.opening import opening
from unisono.engine.placement import find_placement, own_stream, switches
from unisono.engine.recipe import Recipe, Work
from unisono.engine.registry import words_for
from unisono.engine.resume import Found, find_checkpoint, restore, run_id
from unisono.engine.state import TrainState
from unisono.engine.trainer import Trainer
from unisono.engine.watch import Watch
from unisono.errors import RecipeError, UnisonoError, UserError
from unisono.faults import Fault, Injector, parse
from unisono.observe.folder import RunFolder, append_event, check_writable
from unisono.settings import Settings

T = TypeVar("T")


@dataclass(frozen=True)
class Start:
    """How this process came to run."""

    world: World
    asked_devices: int | None = None  # on this machine; more than there are: kept by accumulation
    job_folder: Path | None = None  # under our own launcher
    remarks: list[str] = field(default_factory=list)  # said once, by the main rank
    trained: Event = field(default_factory=Event)  # set when the first step has succeeded


def run_session(kind: type[Recipe], resolved: Resolved, start: Start) -> Result:
    """Trains on this rank; every rank of the run calls it."""
    settings = resolved.build(Settings)
    check_settings(settings)
    world = start.world
    pulse = Pulse(world.rank, start.job_folder)
    limits = Limits(settings.launch.hang_timeout, settings.launch.start_timeout)
    folder: Path | None = None
    with Watchdog(pulse, world, limits) as watchdog:
        place = find_placement(world, settings)
        find_s = limits.start_s or PATIENCE.total_seconds()
        alone, gloo = settings.parallel.strategy in ("ddp", "fsdp"), settings.launch.backend == "gloo"
        join(world, place.device, alone=alone, timeout_s=find_s, gloo=gloo)
        watchdog.joined()
        try:
            with StopRequest(world.launcher, start.job_folder) as stop:
                session = Session(kind, resolved, start, stop, pulse)
                session.note_unfinished()
                folder = path = watchdog.run_folder = session.folder
                watchdog.note = lambda kind, details: append_event(path, kind, **details)
                result = session.run()
        except BaseException as error:
            if not isinstance(error, UnisonoError):
                error.add_note(f"on rank {world.rank}, in {pulse.last.phase} of step {pulse.last.step}")
                if world.launcher == "plain" and isinstance(error, Exception) and folder is not None:
                    append_event(folder, "failed", step=pulse.last.step, rank=0, error=in_words(error))
            if world.size == 1:  # otherwise a peer may be gone, and leaving could wait for it for ever
                leave()
            raise
        leave(together=world.launcher in ("slurm", "mpi"))
    return result


class Session:
    """One rank's part in a run: its folder, its settings as the run has them, and what trains."""

    def __init__(self, kind: type[Recipe], resolved: Resolved, start: Start, stop: StopRequest, pulse: Pulse) -> None:
        self._kind, self._start, self._stop, self._pulse = kind, start, stop, pulse
        self._agreement = Agreement(alone=start.world.size == 1)
        self._name = kind.__qualname__
        resume = resolved.values["resume"]
        path = self._agreement.main_says(resolved.values["output_dir"] or default_folder(self._name))
        resolved = resolved.with_values(resolved.sources["output_dir"], output_dir=path)
        self.main_decides(lambda: check_writable(path))
        check_shared(path, start.world, self._agreement)
        here = self._record = self.main_decides(lambda: read_own(path))
        self._stored_batch = None if here is None else here.get("global_batch")
        self._begun_from = {str(start.get("resume")) for start in (here or {}).get("starts", [])}
        record = here or self.main_decides(lambda: record_of(resume))
        where = f"output_dir {path}" if here else f"resume {resume}"
        self._resolved = continue_run(resolved, record, self._name, (Settings, kind.Config), where, kind.fixed)
        self._changed = changed(self._resolved, here, (Settings, kind.Config))
        self._settings = self._resolved.build(Settings)
        check_settings(self._settings)
        self._folder = RunFolder(path)
        if here is not None:
            self.main_decides(self._folder.hold)
        faults, memory = parse(self._settings.run.inject), Path(path, ".injected")
        pulse.injector = Injector(faults, start.world.rank, memory, self._note_fault)
        self._remarks = list(start.remarks)
        if self._changed:
            told = (f"{name} {before} → {now}" for name, (before, now) in self._changed.items())
            self._remarks.append(f"since its last start: {', '.join(told)}")
        words, before = words_for(kind), (here or {}).get("recipe_from")
        if before not in (None, words):
            self._remarks.append(f"this run's recipe was {before}, now it is {words}")

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return self._folder.path

    def run(self) -> Result:
        """Trains from the newest checkpoint to the end."""
        with self.computing(), closing(self._folder):
            trainer = self.build()
            if trainer is None:
                return Result(self._folder.path, "stopped", self._from_step, {})
            result = trainer.train()
            self._folder.event(result.status, step=result.step)
            return result

    def note_unfinished(self) -> None:
        """Where a start has chosen a folder of its own: says that the same run could go on."""
        if self._record is None:
            classes = (Settings, self._kind.Config)
            self._remarks += self.main_decides(lambda: unfinished(self._resolved, self._name, classes))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around whatever computes: torch's switches as the settings want them, and memory that is kept."""
        with switches(self._settings, many_shapes=self._kind.many_shapes):
            place = find_placement(self._start.world, self._settings)
            with own_stream(self._settings, place.device), kept_heap(place.device):
                yield

    def close(self) -> None:
        """Lets go of the folder."""
        self._folder.close()

    def named_checkpoint(self, path: str) -> Path:
        """The checkpoint at a path that the user has named: it, the newest of a folder of them, or of a run."""
        found = self.main_decides(lambda: find_checkpoint(path, self._folder.path, self._name)).path
        assert found is not None
        return found

    def build(self, trainer: type[Trainer] = Trainer) -> Trainer | None:
        """All that trains, as of the checkpoint that the run goes on from; None when asked to stop meanwhile."""
        settings, world = self._settings, self._start.world
        place = find_placement(world, settings)
        self._found = self.main_decides(self._find_checkpoint)
        checkpoint = self._found.path
        self._remarks += self._found.remarks
        self._id = self.main_decides(lambda: run_id(self._record, self._folder.path, checkpoint))
        devices = len(place.devices) if settings.parallel.strategy == "dp" else world.size
        batch = self._batch(checkpoint, devices, on_gpu=place.device.type == "cuda")
        seed = settings.run.seed
        seed_everything(key_of(Purpose.BUILD, seed, 2), place.devices)
        recipe = self._kind(self._resolved.build(self._kind.Config))
        recipe.check_settings(settings)
        if self._prepare(recipe, place.device):
            if world.is_main:
                print_line("stopping before the first step; what is prepared is kept")
            self._from_step = 0 if checkpoint is None else read_manifest(checkpoint).step
            return None
        data, eval_data = build_dataset(recipe, "train", seed), build_dataset(recipe, "eval", seed)
        assert data is not None
        size = len(data)  # type: ignore[arg-type]
        if len(set(self._agreement.agree_all(size))) > 1:
            raise RecipeError(f'dataset("train") has {size} samples here and another number on other ranks')
        if size < batch.global_batch and not recipe.whole_epochs:
            self._remarks.append(
                f"the data set has {size} samples, fewer than the effective batch of {batch.global_batch}: "
                "a step reads on into the next epoch"
            )
        parts = build_parts(recipe, settings, place, batch)
        save_group = dist.new_group(backend="gloo", timeout=PATIENCE) if world.size > 1 else None
        if checkpoint is not None:
            restore(checkpoint, parts, save_group)
            best = self.main_decides(lambda: read_best(self._folder.path / "checkpoints"))
            if best is not None and best["step"] <= parts.state.step:  # a last evaluation comes after the last save
                parts.state.best = best
            if parts.state.num_samples not in (0, size):
                self._remarks.append(
                    f"the data set had {parts.state.num_samples:,} samples before and has {size:,} now: "
                    "from here on the order is another one"
                )
        parts.state.num_samples = size
        self._from_step = parts.state.step
        length = Length.of(settings, size, parts.state, whole_epochs=recipe.whole_epochs)
        evaluated = is_evaluated(parts.state, length)
        recipe.evaluations = self.main_decides(lambda: self._folder.evaluations(parts.state.step, evaluated=evaluated))
        self._remarks += [
            *self._idle_faults(length),
            *length.remarks(settings, 0 if recipe.whole_epochs else parts.state.step),
        ]
        self._announce(parts, batch, length, size, eval_data, checkpoint)
        watch = Watch(
            self._folder,
            place,
            settings.observe,
            self._agreement,
            total_steps=length.steps,
            start_step=parts.state.step,
            start_samples=parts.state.samples,
            recordable=parts.recordable,
            open_folder=lambda: self._open(parts),
        )
        evaluation = None
        if eval_data is not None:
            evaluation = Evaluation(
                recipe, parts.strategy, eval_data, settings, self._agreement, self._pulse, self._stop
            )
        identity = {"recipe": self._name, "seed": seed, "global_batch": batch.global_batch, "run": self._id}
        return trainer(
            parts,
            settings,
            batch,
            data,
            evaluation,
            self._folder,
            watch,
            self._stop,
            self._agreement,
            save_group,
            identity,
            self._pulse,
            self._work(place.device),
        )

    def _idle_faults(self, length: Length) -> list[str]:
        """Faults that were asked for and cannot happen."""
        world, faults = self._start.world.size, parse(self._settings.run.inject)
        far = [fault for fault in faults if fault.rank is not None and fault.rank >= world]
        late = [fault for fault in faults if fault.step > length.steps]
        remarks = [f"inject: {fault.text} will not happen, there are {world} ranks" for fault in far]
        return remarks + [f"inject: {fault.text} will not happen, the run has {length.steps} steps" for fault in late]

    def _note_fault(self, fault: Fault, step: int) -> None:
        append_event(self._folder.path, "injected", step=step, rank=self._start.world.rank, fault=fault.text)

    def main_decides(self, decide: Callable[[], T]) -> T:
        """What the main rank finds out, or its mistake, on every rank."""
        answer: tuple[bool, Any] = (True, None)
        if self._start.world.is_main:
            try:
                answer = (True, decide())
            except UserError as error:
                answer = (False, str(error))
        good, value = self._agreement.main_says(answer)
        if not good:
            raise UserError(value)
        return value  # type: ignore[no-any-return]

    def _batch(self, checkpoint: Path | None, devices: int, on_gpu: bool) -> BatchPlan:
        stored, known = self._stored_batch, self.main_decides(lambda: remembered(self._folder.path)) or 0
        if checkpoint is not None:
            state = self.main_decides(lambda: read_extra(checkpoint)["state"])
            stored = int(state["global_batch"])
            known = min(filter(None, (known, state.get("micro_batch", 0))), default=0)
        # The first rank of each machine speaks for it: a new run's batch follows from the machines at its first start.
        first = self._start.world.local_rank == 0
        asked = self._agreement.agree_all(self._start.asked_devices if first else 0)
        plan = plan_batch(
            self._settings.batch,
            self._resolved.explicit,
            devices=devices,
            asked_devices=None if None in asked else sum(filter(None, asked)),
            stored=stored,
        )
        return with_micro_batch(plan, self._settings.batch.micro_batch, known, on_gpu=on_gpu)

    def _prepare(self, recipe: Recipe, device: torch.device) -> bool:
        """Lets the recipe prepare; True when somebody asked to stop meanwhile."""
        if type(recipe).prepare is Recipe.prepare:
            return False
        work = self._work(device)
        folder = work.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be made ({error.strerror}); choose another --output_dir") from None
        self._pulse.at("prepare", 0)
        recipe.prepared = folder
        try:
            recipe.prepare(work)
        except UserError:
            for path in (folder, folder.parent):  # nothing is left behind by a mistake, where there was nothing before
                with suppress(OSError):
                    path.rmdir()
            raise
        self._pulse.at("start", 0)
        return work.meet()  # nobody reads what another rank is still preparing

    def _work(self, device: torch.device) -> Work:
        world = self._start.world
        say: Callable[[str], None] = print_line if world.is_main else lambda text: None
        return Work(
            self._folder.path / "prepared",
            world.rank,
            world.size,
            lambda: self._stop.requested is not None,
            str(device),
            say,
            self._settings.run.seed,
            self._agreement.agree_all,
        )

    def _find_checkpoint(self) -> Found:
        """The checkpoint to go on from. A path is where a run begins: once it has gone on, it goes on from its own."""
        resume, folder = self._settings.run.resume, self._folder.path
        run = (self._record or {}).get("id")
        begun = self._start.world.started_before or (resume in self._begun_from and resume != "never")
        if resume != "auto" and begun and list_steps(folder / "checkpoints"):
            found = find_checkpoint("auto", folder, self._name, run)
            found.remarks.append(f"this run has already gone on from {resume}: going on from its newest checkpoint")
            return found
        return find_checkpoint(resume, folder, self._name, run)

    def _open(self, parts: Parts) -> None:
        """The first step has succeeded: what was found out so far goes to the run's folder."""
        world, state = self._start.world, parts.state
        self._start.trained.set()
        if not world.is_main:
            return
        self._folder.open(
            {
                "id": self._id,
                "recipe": self._name,
                "recipe_from": words_for(self._kind),
                "config": self._resolved.to_json()["values"],
                "sources": self._resolved.to_json()["sources"],
                "seed": self._settings.run.seed,
                "global_batch": state.global_batch,
                "versions": versions(),
                "launcher": world.describe(),
            }
        )
        checkpoints, identity = self._folder.path / "checkpoints", {"recipe": self._name, "run": self._id}
        for aside, why in set_aside_after(checkpoints, self._from_step, identity, self._found.bad):
            self._folder.event("set_aside", step=self._from_step, rank=0, checkpoint=aside.name, why=why)
            print_line(f"note: set aside as {aside.name}: {why}")

    def _announce(
        self, parts: Parts, batch: BatchPlan, length: Length, size: int, eval_data: Any, checkpoint: Path | None
    ) -> None:
        """The banner, and the start in the run's history (written when the folder opens)."""
        world, step = self._start.world, parts.state.step
        why = "new" if checkpoint is None else f"resumed from {checkpoint.name}"
        if world.restart_count:
            why += f", restart {world.restart_count}"
        if not world.is_main:
            return
        self._folder.rewind_metrics(step, evaluated=is_evaluated(parts.state, length))
        self._folder.add_start(
            world=world.size,
            strategy=parts.strategy.name,
            launcher=world.launcher,
            why=why,
            from_step=step,
            resume=self._settings.run.resume,
        )
        kind = "start" if checkpoint is None else "resume"
        more = {"changed": self._changed} if self._changed else {}
        self._folder.event(kind, step=step, rank=0, world=world.size, strategy=parts.strategy.name, **more)
        for line in opening(parts, self._settings, world, batch, length, size, eval_data, self._folder.path, why):
            print_line(line)
        for remark in [*self._remarks, *parts.remarks, *dict.fromkeys(parts.recipe.remarks)]:
            print_line(f"note: {remark}")


def is_evaluated(state: TrainState, length: Length) -> bool:
    """Whether the evaluation of the state's step is over for good; a run that is started at its end does it again."""
    return not state.owes_evaluation and state.samples < length.samples
