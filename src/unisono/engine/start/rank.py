"""The program of a rank that our launcher starts; the environment variable UNISONO_JOB names the job's folder."""

from __future__ import annotations

import os
from pathlib import Path

from unisono.cluster.hangs.stacks import write_stacks_on_signal
from unisono.cluster.lifetime import die_with_parent, end_process, flush_streams
from unisono.cluster.signals import note_signals_early
from unisono.formatting import describe_exception
from unisono.typed_paths import adopt_typed, note_start_folder

if __name__ == "__main__":
    # Do this before importing torch, which takes seconds in which the parent could die or a signal could arrive.
    die_with_parent()
    note_signals_early()
    note_start_folder()
    write_stacks_on_signal(Path(os.environ["UNISONO_JOB"]), int(os.environ["RANK"]))

import json
from dataclasses import asdict, replace
from threading import Event
from typing import TYPE_CHECKING, Any

from unisono import tracebacks
from unisono.cluster.environment import detect
from unisono.cluster.outcome import Kind, Outcome, write
from unisono.errors import EXIT_STOPPED, TryAgain, TrySmaller, UnisonoError, UserError

if TYPE_CHECKING:
    from unisono.engine.start.rank_start import RankStart


def main() -> int:
    """Runs the job in the job folder and writes the outcome there; exits with status 0 if the job succeeded."""
    folder = Path(os.environ["UNISONO_JOB"])
    rank = int(os.environ["RANK"])
    trained = Event()
    try:
        status = _train(folder, trained)
    except TryAgain as error:
        write(folder, Outcome("out_of_memory" if isinstance(error, TrySmaller) else "crashed", str(error), rank))
    except UnisonoError as error:
        kind: Kind = "user_error" if isinstance(error, UserError) else "failed"
        write(folder, Outcome(kind, str(error), rank))
    except BaseException as error:
        tracebacks.save_if_unreported(error)
        outcome = Outcome("crashed", describe_exception(error), rank, traceback=tracebacks.format_short(error))
        if not trained.is_set() and not outcome.blames_a_peer:
            outcome = replace(outcome, kind="failed")  # before the first step, so another attempt would fail too
        write(folder, outcome)
    else:
        write(folder, Outcome(status, rank=rank))
        return 0
    flush_streams()
    os._exit(1)  # skips destructors, which may wait for a peer that has died


def _train(folder: Path, trained: Event) -> Kind:
    from unisono.config.resolve import Resolved
    from unisono.engine.start.rank_start import RankStart
    from unisono.engine.start.registry import load_recipe
    from unisono.engine.start.session import run_session
    from unisono.settings import Settings

    job = json.loads((folder / "job.json").read_text())
    adopt_typed(job.get("typed", {}))
    is_locked = job.get("folder_is_locked", False)
    start = RankStart(detect(), job["requested_devices"], folder, job["remarks"], trained, folder_is_locked=is_locked)
    if "call" in job:
        return _call(job, start)
    recipe_class = load_recipe(job["recipe"])
    resolved = Resolved.from_json((Settings, recipe_class.Config), job["resolved"])
    result = run_session(recipe_class, resolved, start)
    if start.world.local_rank == 0:  # each machine has a job folder of its own
        (folder / "result.json").write_text(json.dumps({**asdict(result), "folder": str(result.folder)}))
    return "stopped" if result.status == "stopped" else "done"


def _call(job: dict[str, Any], start: RankStart) -> Kind:
    """Calls a function that drives a run itself, instead of a recipe; its exit code reports a stopped run."""
    from unisono.references import load_object

    assert start.job_folder is not None
    status: Kind = "done"
    try:
        result = load_object(job["call"])(job["arguments"], start)
    except SystemExit as error:
        if error.code != EXIT_STOPPED:
            raise
        status, result = "stopped", None
    if start.world.local_rank == 0:
        (start.job_folder / "result.json").write_text(json.dumps(result))
    return status


if __name__ == "__main__":
    end_process(main())
