"""The results of a study: its trials, the best trial, and the command that trains the best trial again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import UserError
from unisono.observe.folder import RunFolder
from unisono.tuning.plan import read_study
from unisono.tuning.storage import best_of, close_database, has_database, load_optuna, open_database
from unisono.tuning.trial_run import folder_of
from unisono.typed_paths import as_typed

if TYPE_CHECKING:
    import optuna

STATES = {
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
    "RUNNING": "unfinished",
    "WAITING": "unfinished",
}


@dataclass(frozen=True)
class TrialResult:
    """One trial of a study."""

    number: int
    state: str
    """complete, pruned, failed or unfinished."""
    params: Mapping[str, Any]
    """The values of the searched settings."""
    value: float | None
    """The objective at the last evaluation of a complete or pruned trial."""
    step: int | None
    """The step of the last evaluation."""
    evaluations: Sequence[tuple[int, float]]
    """Step and objective of each evaluation."""
    folder: Path
    """The run folder."""
    seconds: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Study:
    """The trials of a study, read from its folder."""

    folder: Path
    recipe: str
    objective: str
    direction: str
    search: Mapping[str, str]
    num_trials: int
    """Number of finished trials at which the study ends."""
    command: Sequence[str]
    """The command that the trials share, without the values of the searched settings."""
    record: Mapping[str, Any]
    trials: Sequence[TrialResult]
    best: TrialResult | None
    importances: Mapping[str, float] = field(default_factory=dict)
    """The importance of each searched setting for the objective (PED-ANOVA); empty if there are too few trials."""

    def count(self, state: str) -> int:
        """Returns the number of trials in a state: complete, pruned, failed or unfinished."""
        return sum(trial.state == state for trial in self.trials)

    @property
    def num_finished(self) -> int:
        """Number of complete, pruned and failed trials."""
        return len(self.trials) - self.count("unfinished")

    def best_command(self) -> str | None:
        """Returns the command that trains the best trial again, with the same effective batch on any devices."""
        return None if self.best is None else shlex.join(self._best_words(self.best))

    def _best_words(self, best: TrialResult) -> list[str]:
        words = [*self.command, *(f"--{name}={value}" for name, value in best.params.items())]
        record = RunFolder.read(best.folder) or {}
        config, starts = record.get("config", {}), record.get("starts") or [{}]
        sizes = ("global_batch_size", "gradient_accumulation_steps")
        if starts[-1].get("world", 1) != 1 and all(config.get(name) is None for name in sizes):
            words.append(f"--global_batch_size={record['global_batch']}")
        words.append(f"--output_dir={as_typed(self.folder)}/best")
        return words


def read_trials(folder: Path) -> Study:
    """Reads a study's folder; raises UserError if it contains none."""
    record = read_study(folder)
    if record is None or not has_database(folder):
        raise UserError(f"{folder} contains no study of unisono tune")
    optuna = load_optuna()
    storage = None
    try:
        storage = open_database(folder, shared=False)
        [study] = [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]
        frozen = study.get_trials(deepcopy=False)
        importances = _importances(study)
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"the database of the study in {folder} cannot be read ({reason})") from error
    finally:
        if storage is not None:
            close_database(storage)
    trials = [_result(folder, trial) for trial in frozen]
    best = best_of(frozen, record["direction"])
    return Study(
        folder=folder,
        recipe=record["recipe"],
        objective=record["objective"],
        direction=record["direction"],
        search=record["search"],
        num_trials=record["trials"],
        command=[as_typed(word) for word in record["command"]],
        record=record,
        trials=trials,
        best=None if best is None else trials[best.number],
        importances=importances,
    )


def _result(folder: Path, trial: optuna.trial.FrozenTrial) -> TrialResult:
    evaluations = sorted(trial.intermediate_values.items())
    return TrialResult(
        number=trial.number,
        state=STATES[trial.state.name],
        params=dict(trial.params),
        value=trial.value if trial.value is not None else (evaluations[-1][1] if evaluations else None),
        step=evaluations[-1][0] if evaluations else None,
        evaluations=evaluations,
        folder=folder_of(folder, trial.number),
        seconds=trial.user_attrs.get("seconds"),
        error=str(trial.user_attrs.get("error", "")),
    )


def _importances(study: optuna.Study) -> dict[str, float]:
    from optuna.importance import get_param_importances

    complete = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
    if len(complete) < 4 or len({trial.value for trial in complete}) < 2:
        return {}
    try:
        return dict(get_param_importances(study))
    except (RuntimeError, ValueError):  # each setting has the same value in every trial
        return {}
