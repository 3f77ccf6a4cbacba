"""Runs a study: starts trials side by side, prunes them at their evaluations, and continues after a kill.

The study's process never trains: it starts and monitors processes of `unisono train`. All of its state is in study.db
and in the trials' run folders, so a study that was killed continues exactly where it stopped: trials that were running
continue from their own checkpoints.

Several processes, also on several machines, may work on one study (`shared`). Each process decides about trials while
it holds the lock of the study's folder, and holds a lock for each trial that it trains. The kernel releases the locks
of a process that dies, so another process, or the same one after a requeue, continues its trials.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from unisono.cluster.environment import detect
from unisono.cluster.signals import handling_stop_signals
from unisono.engine.checks import check_not_in_storage
from unisono.engine.recipe import Recipe
from unisono.engine.run_folder.new_folder import default_folder
from unisono.engine.start.registry import check_recipe, importable_name, load_recipe
from unisono.engine.start.settings_source import SettingsSource, source_of
from unisono.errors import EXIT_STOPPED, EXIT_USER_ERROR, ConfigError, TrainingFailed, UnisonoError, UserError
from unisono.formatting import format_count, format_number
from unisono.observe.folder import RUN, check_writable
from unisono.tuning.page import write_page
from unisono.tuning.plan import SETTINGS, StudyOptions, StudyPlan, plan_study
from unisono.tuning.slots import Slot, slots_of
from unisono.tuning.storage import JOURNAL, Storage, Trial, load_optuna
from unisono.tuning.study import Study, read_trials
from unisono.tuning.study_lock import StudyLock
from unisono.tuning.trial_run import NoObjective, TrialRun, final_value, folder_of, mark_trial, num_steps
from unisono.typed_paths import absolute, as_typed, note_start_folder

_POLL_S = 0.05
_LOOK_AGAIN_S = 5.0
"""Interval in seconds at which a process with a free slot looks for trials whose process has died."""
_ALL_FAILED = 3
"""The study ends with an error if this many trials have finished and all of them have failed."""


class StudyStopped(UnisonoError):
    """Raised if a signal stopped the study; the same command continues it."""

    exit_code = EXIT_STOPPED

    def __init__(self, signal_name: str, folder: str) -> None:
        super().__init__(f"stopped by {signal_name}; to continue, run the same command with --output_dir {folder}")


def tune(
    recipe: type[Recipe] | str,
    config: Any = None,
    *,
    search: Mapping[str, Any],
    trials: int = 20,
    objective: str | None = None,
    direction: str | None = None,
    pruner: str = "median",
    pruner_startup_trials: int = 5,
    sampler: str = "tpe",
    parallel: int = 1,
    **settings: Any,
) -> Study:
    """Searches for good settings of a recipe with Optuna, and returns the study: its trials and the best one.

    `search` maps settings to values to try: a range such as "log:1e-5..1e-2" or "16..256:16", or a list of choices.
    Every trial is a process of `unisono train`, so the recipe must be in a file of its own. `config` and the other
    keywords are settings of all trials, as in `unisono.train`. Another call with the same `output_dir` continues the
    study.
    """
    note_start_folder()
    recipe_class = load_recipe(recipe) if isinstance(recipe, str) else recipe
    check_recipe(recipe_class)
    reference = recipe if isinstance(recipe, str) else importable_name(recipe_class)
    if reference is None:
        raise UserError(
            f"{recipe_class.__name__} is defined in {recipe_class.__module__}, which other processes cannot import; "
            "move it to a file of its own"
        )
    options = StudyOptions(
        trials=trials,
        objective=objective,
        direction=direction,  # type: ignore[arg-type]  # checked by check()
        pruner=pruner,  # type: ignore[arg-type]
        pruner_startup_trials=pruner_startup_trials,
        sampler=sampler,  # type: ignore[arg-type]
        parallel=parallel,
    )
    source = source_of(config, recipe_class, settings, searched=list(search))
    return run_study(recipe_class, reference, search, options, source, lambda text: print(text, flush=True))


def run_study(
    recipe_class: type[Recipe],
    recipe: str,
    search: Mapping[str, object],
    options: StudyOptions,
    source: SettingsSource,
    say: Callable[[str], None],
    *,
    shared: bool = False,
) -> Study:
    """Runs a study to its end, or continues it; raises StudyStopped if a signal stops it.

    `shared`: other processes may work on the study at the same time. The function then returns when no trial is left
    for this process.
    """
    world = detect()
    if world.launcher != "plain" and world.size > 1:
        raise UserError(f"tune starts its own runs; start it once, without {world.launcher}")
    load_optuna()
    plan = plan_study(recipe_class, recipe, search, options, source)
    check_not_in_storage(plan.base, "tune")
    slots, notes = slots_of(plan.base, options.parallel)
    output = plan.base.values["output_dir"]
    if shared and not output:
        raise ConfigError("join: pass --output_dir with the folder of the study, the same for all processes")
    path = absolute(output or default_folder(f"tune-{recipe_class.__qualname__}"))
    check_writable(path)
    folder = Path(path)
    shared = shared or (folder / JOURNAL).exists()
    with ExitStack() as cleanup:
        lock = StudyLock(folder, shared=shared)
        cleanup.enter_context(lock.whole_study())
        with lock.decision():
            if (folder / RUN).exists():
                raise ConfigError(
                    f"output_dir {as_typed(path)} is the folder of a run; choose another one for the study"
                )
            plan.check_same(folder)
            plan.write(folder)
            storage = Storage(folder, plan, shared=shared)
        cleanup.callback(storage.close)
        for note in notes:
            say(f"note: {note}")
        loop = _Loop(folder, plan, slots, storage, lock, say)
        try:
            loop.run()
        finally:
            with lock.decision():
                write_page(read_trials(folder))
    return read_trials(folder)


@dataclass
class _Running:
    run: TrialRun
    trial: Trial
    slot: Slot
    began: float


class _Loop:
    """Starts, monitors and ends the trials of a study."""

    def __init__(
        self,
        folder: Path,
        plan: StudyPlan,
        slots: Sequence[Slot],
        storage: Storage,
        lock: StudyLock,
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._plan, self._storage, self._lock, self._say = folder, plan, storage, lock, say
        self._free, self._running = list(slots), list[_Running]()
        self._look_again_at = 0.0
        self._signal: str | None = None

    def run(self) -> None:
        """Runs trials until enough of them have finished."""
        with self._lock.decision():
            for trial in self._storage.finished():  # the study may have been killed before updating the run folder
                self._mark(trial.number)
            done, unfinished = self._storage.num_finished, len(self._storage.unfinished())
        if done or unfinished:
            whose = "unfinished" if self._lock.shared else "to continue"
            self._say(f"continuing the study: {format_count(done, 'trial')} finished, {unfinished} {whose}")
        with handling_stop_signals(self._on_signal), self._killing_trials_on_error():
            while True:
                self._start_trials()
                if not self._running:
                    break
                for running in list(self._running):
                    self._follow(running)
                time.sleep(_POLL_S)
        if self._signal is not None:
            raise StudyStopped(self._signal, as_typed(self._folder))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or signal.Signals(number).name
        for running in self._running:
            running.run.stop()

    @contextmanager
    def _killing_trials_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for running in self._running:
                running.run.kill()
            raise

    def _start_trials(self) -> None:
        while self._free and self._signal is None:
            trial = self._next_trial()
            if trial is None or self._signal is not None:  # a signal may arrive while waiting for the lock
                return
            if not trial.is_new and self._prune_after_kill(trial):
                continue
            slot = self._free.pop(0)
            arguments = [self._plan.recipe, *self._plan.source.arguments(self._folder / SETTINGS)]
            arguments += [f"--{name}={value}" for name, value in trial.values.items()]
            arguments += [*self._checkpoint_flags(), *slot.flags]
            run = TrialRun(self._folder, trial.number, arguments, slot.environ, self._plan.objective, trial.last_step)
            self._running.append(_Running(run, trial, slot, time.monotonic()))
            if self._signal is not None:  # the signal arrived before this trial was in the list
                run.stop()

    def _next_trial(self) -> Trial | None:
        """Returns an unfinished trial that no process trains, or a new trial; None if there is neither."""
        if time.monotonic() < self._look_again_at:
            return None
        with self._lock.decision():
            for number in self._storage.unfinished():
                if self._lock.claim(number):
                    return self._storage.begin(number)
            number = self._storage.num_trials
            if number < self._plan.options.trials and self._lock.claim(number):
                return self._storage.begin()
        self._look_again_at = time.monotonic() + _LOOK_AGAIN_S
        return None

    def _prune_after_kill(self, trial: Trial) -> bool:
        """Prunes a trial whose last evaluation was recorded, but not yet judged, when the study was killed."""
        folder = folder_of(self._folder, trial.number)
        if not 0 < trial.last_step < num_steps(folder) or not self._storage.should_prune(trial.number):
            return False
        self._storage.prune(trial.number)
        self._conclude(trial.number)
        return True

    def _checkpoint_flags(self) -> list[str]:
        """Makes trials save at each evaluation, so a killed trial loses little; the user's settings take precedence."""
        base, flags = self._plan.base, []
        if not base.explicit("save_every") and base.values["eval_every"] > 0:
            flags.append(f"--save_every={base.values['eval_every']}")
        if not base.explicit("keep_last"):
            flags.append("--keep_last=1")
        return flags

    def _follow(self, running: _Running) -> None:
        run, number = running.run, running.trial.number
        code = run.poll()  # before reading the evaluations, so that none is missed if the run ends in between
        if not run.is_pruned:
            for step, value, is_last in run.new_evaluations():
                self._storage.report(number, step, value)
                if not is_last and self._storage.should_prune(number):
                    run.is_pruned = True
                    self._storage.prune(number, seconds=round(time.monotonic() - running.began, 1))
                    run.stop()
                    break
        if code is None:
            return
        self._running.remove(running)
        self._free.insert(0, running.slot)
        if run.is_pruned:
            self._conclude(number)
        elif not (self._signal and code in (EXIT_STOPPED, -signal.SIGTERM)):  # SIGTERM: Python had only just started
            self._finish(running, code)

    def _finish(self, running: _Running, code: int) -> None:
        run, number = running.run, running.trial.number
        notes = {"seconds": round(time.monotonic() - running.began, 1)}
        value = final_value(run.folder, self._plan.objective)
        if code == 0 and value is None:
            raise NoObjective(f"trial {number} has no evaluation: the recipe's dataset('eval') is missing or empty")
        if code == 0 and value is not None:
            self._storage.complete(number, value, **notes)
        else:
            self._storage.fail(number, run.last_words(), **notes)
        self._conclude(number)
        finished = self._storage.finished()
        if len(finished) >= min(_ALL_FAILED, self._plan.options.trials) and all(
            trial.state.name == "FAIL" for trial in finished
        ):
            error = finished[-1].user_attrs.get("error", "")
            text = f"all {len(finished)} trials have failed, the last one with: {error} (see {as_typed(run.log)})"
            raise UserError(text) if code == EXIT_USER_ERROR else TrainingFailed(text)

    def _conclude(self, number: int) -> None:
        with self._lock.decision():
            self._mark(number)
        self._lock.release(number)
        self._announce(number)

    def _mark(self, number: int) -> None:
        """Records a trial's outcome in its run folder."""
        trial = next(each for each in self._storage.finished() if each.number == number)
        outcome = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}[trial.state.name]
        details: dict[str, Any] = {"study": os.path.basename(self._folder), "trial": number}
        if trial.intermediate_values:
            step = max(trial.intermediate_values)
            value = trial.intermediate_values[step]
            details |= {
                "step": step,
                "objective": self._plan.objective,
                "value": value if math.isfinite(value) else str(value),
            }
        mark_trial(folder_of(self._folder, number), outcome, **details)

    def _announce(self, number: int) -> None:
        finished = self._storage.finished()
        trial = next(each for each in finished if each.number == number)
        objective, best = self._plan.objective, self._storage.best()
        if trial.state.name == "FAIL":
            result = f"failed: {trial.user_attrs.get('error', '')}"
        elif trial.state.name == "PRUNED":
            step = max(trial.intermediate_values)
            result = f"pruned at step {step}, {objective} {format_number(trial.intermediate_values[step])}"
        else:
            result = f"{objective} {format_number(trial.value or 0.0)}"
        values = "  ".join(f"{name} {value}" for name, value in trial.params.items())
        leader = "" if best is None else f"  (best {format_number(best.value or 0.0)}, trial {best.number})"
        self._say(f"[{len(finished)}/{self._plan.options.trials}] trial {number}: {result}{leader}  {values}")
