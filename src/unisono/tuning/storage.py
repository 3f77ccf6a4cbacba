"""Stores the study in an Optuna database in the study's folder, which survives a kill at any moment.

The database is study.db (SQLite), or study.log if several processes work on the study: Optuna's journal, whose locks
also work on network file systems.

A sampler's random numbers depend on (seed, trial, setting), not on the sampler's state. A study that was killed
therefore continues with the same values as an uninterrupted study, even if it was killed while drawing values.
"""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import UserError
from unisono.tuning.plan import StudyPlan
from unisono.tuning.space import Choices, Space

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

DATABASE, JOURNAL = "study.db", "study.log"
_NAME = "study"


@dataclass(frozen=True)
class Trial:
    """A trial of the study."""

    number: int
    values: Mapping[str, str]
    """The values of the searched settings, as text for flags."""
    is_new: bool
    """Whether the trial has just been created, rather than continued after a kill."""
    last_step: int
    """The last step whose evaluation was recorded; -1 if there is none."""


class Storage:
    """The trials of a study: draws their values, records their evaluations and results."""

    def __init__(self, folder: Path, plan: StudyPlan, *, shared: bool = False) -> None:
        """Creates the study's database in `folder`, or opens it."""
        self._plan, self._optuna = plan, load_optuna()
        self._storage = open_database(folder, shared=shared)
        self._study = self._optuna.create_study(
            storage=self._storage,
            study_name=_NAME,
            direction=plan.direction,
            pruner=_pruner(plan),
            load_if_exists=True,
        )
        self._trials: dict[int, optuna.trial.Trial] = {}

    @property
    def num_finished(self) -> int:
        """Number of finished trials: complete, pruned or failed."""
        return sum(trial.state.is_finished() for trial in self._study.get_trials(deepcopy=False))

    @property
    def num_trials(self) -> int:
        """Number of trials that have been created."""
        return len(self._study.get_trials(deepcopy=False))

    def finished(self) -> list[FrozenTrial]:
        """Returns all finished trials, in order."""
        return [trial for trial in self._study.get_trials(deepcopy=False) if trial.state.is_finished()]

    def unfinished(self) -> list[int]:
        """Returns the numbers of the trials that were running when the study was stopped or killed."""
        return [trial.number for trial in self._study.get_trials(deepcopy=False) if not trial.state.is_finished()]

    def begin(self, number: int | None = None) -> Trial:
        """Creates a trial, or continues the one with this number, and returns it with its values."""
        is_new = number is None
        if number is None:
            number = len(self._study.get_trials(deepcopy=False))
            self._study.sampler = self._sampler(number, "")
            trial = self._study.ask()
            assert trial.number == number  # no other process can create trials while this one holds the study's lock
        else:
            self._study.sampler = self._sampler(number, "")
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(
                self._storage.get_study_id_from_name(_NAME), number
            )
            trial = self._optuna.trial.Trial(self._study, trial_id)
        self._trials[number] = trial
        values = {}
        for space in self._plan.spaces:
            self._study.sampler = self._sampler(number, space.name)
            values[space.name] = space.shown(_suggest(trial, space))
        steps = self._frozen(number).intermediate_values
        return Trial(number, values, is_new, max(steps, default=-1))

    def report(self, number: int, step: int, value: float) -> None:
        """Records an evaluation of a running trial."""
        self._trials[number].report(value, step)

    def should_prune(self, number: int) -> bool:
        """Returns whether the trial should stop because its last evaluation is bad."""
        return bool(self._study.pruner.prune(self._study, self._frozen(number)))

    def complete(self, number: int, value: float, **notes: Any) -> None:
        """Ends a trial with its objective value; if the value is not finite, the trial counts as failed."""
        if not math.isfinite(value):
            self.fail(number, f"the objective is {value}", **notes)
            return
        self._note(number, notes)
        self._study.tell(self._trials.pop(number), value)

    def prune(self, number: int, **notes: Any) -> None:
        """Ends a trial that was stopped early; its value is the value of its last evaluation."""
        self._note(number, notes)
        self._study.tell(self._trials.pop(number), state=self._optuna.trial.TrialState.PRUNED)

    def fail(self, number: int, error: str, **notes: Any) -> None:
        """Ends a trial that failed."""
        self._note(number, {**notes, "error": error})
        self._study.tell(self._trials.pop(number), state=self._optuna.trial.TrialState.FAIL)

    def best(self) -> FrozenTrial | None:
        """Returns the best complete trial."""
        return best_of(self.finished(), self._plan.direction)

    def close(self) -> None:
        """Closes the database."""
        close_database(self._storage)

    def _note(self, number: int, notes: Mapping[str, Any]) -> None:
        for name, value in notes.items():
            self._trials[number].set_user_attr(name, value)

    def _frozen(self, number: int) -> FrozenTrial:
        frozen: FrozenTrial = self._storage.get_trial(self._trials[number]._trial_id)
        return frozen

    def _sampler(self, number: int, name: str) -> optuna.samplers.BaseSampler:
        digest = hashlib.sha256(f"{self._plan.seed}/{number}/{name}".encode()).digest()
        seed = int.from_bytes(digest[:4], "little")
        samplers = {"random": self._optuna.samplers.RandomSampler, "tpe": self._optuna.samplers.TPESampler}
        sampler: optuna.samplers.BaseSampler = samplers[self._plan.options.sampler](seed=seed)
        return sampler


def load_optuna() -> Any:
    """Imports Optuna; raises UserError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise UserError('tune needs Optuna, which is not installed; run: pip install "unisono[tune]"') from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def has_database(folder: Path) -> bool:
    """Returns whether the folder contains the database of a study."""
    return (folder / DATABASE).is_file() or (folder / JOURNAL).is_file()


def open_database(folder: Path, *, shared: bool) -> optuna.storages.BaseStorage:
    """Opens the database in `folder`, or creates one; `shared`: for several processes on several machines."""
    storages = load_optuna().storages
    if shared and (folder / DATABASE).is_file():
        raise UserError(f"{folder} contains a study that was started without --join; choose another --output_dir")
    if shared or (folder / JOURNAL).is_file():
        backend = storages.journal.JournalFileBackend(str(folder / JOURNAL))
        database: optuna.storages.BaseStorage = storages.JournalStorage(backend)
    else:
        database = storages.RDBStorage(database_url(folder / DATABASE))
    return database


def close_database(database: optuna.storages.BaseStorage) -> None:
    """Closes a database that `open_database` opened."""
    database.remove_session()
    if hasattr(database, "engine"):  # SQLite
        database.engine.dispose()


def database_url(file: Path) -> str:
    """Returns the address of an SQLite file for SQLAlchemy."""
    from sqlalchemy.engine import URL

    return URL.create("sqlite", database=str(file.resolve())).render_as_string()


def best_of(trials: list[FrozenTrial], direction: str) -> FrozenTrial | None:
    """Returns the best complete trial; the first of several equal trials."""
    complete = [trial for trial in trials if trial.state.name == "COMPLETE" and trial.value is not None]
    if not complete:
        return None
    sign = 1 if direction == "minimize" else -1
    return min(complete, key=lambda trial: (sign * (trial.value or 0.0), trial.number))


def _suggest(trial: optuna.trial.Trial, space: Space) -> Any:
    if isinstance(space, Choices):
        return trial.suggest_categorical(space.name, space.values)
    if space.whole:
        step = int(space.step or 1)
        return trial.suggest_int(space.name, int(space.low), int(space.high), log=space.log, step=step)
    return trial.suggest_float(space.name, space.low, space.high, log=space.log, step=space.step)


def _pruner(plan: StudyPlan) -> optuna.pruners.BasePruner:
    from optuna import pruners

    if plan.options.pruner == "median":
        return pruners.MedianPruner(n_startup_trials=plan.options.pruner_startup_trials)
    if plan.options.pruner == "hyperband":
        every = max(1, plan.base.values["eval_every"])
        return pruners.HyperbandPruner(min_resource=every, max_resource=plan.max_steps or "auto")
    return pruners.NopPruner()
