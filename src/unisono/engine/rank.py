"""One rank, as our launcher starts it: `python -m unisono.engine.rank`, with the job's folder in UNISONO_JOB."""

from __future__ import annotations

import os
from pathlib import Path

from unisono.cluster.lifetime import die_with_parent, end_process, flush_streams
from unisono.cluster.signals import note_signals_early
from unisono.cluster.stacks import write_stacks_on_signal

if __name__ == "__main__":
    # Before torch: importing it takes seconds in which the parent could die, somebody ask to stop, or a disk hang.
    die_with_parent()
    note_signals_early()
    write_stacks_on_signal(Path(os.environ["UNISONO_JOB"]), int(os.environ["RANK"]))

import json
import traceback
from dataclasses import asdict, replace
from threading import Event
from typing import TYPE_CHECKING, Any

from unisono.cluster.environment import detect
from unisono.cluster.outcome import Kind, Outcome, in_words, write
from unisono.errors import EXIT_STOPPED, TryAgain, UnisonoError, UserError

if TYPE_CHECKING:
    from unisono.engine.session import Start


def main() -> int:
    """Trains as the job says and leaves the outcome in its folder; a good end is status 0."""
    folder = Path(os.environ["UNISONO_JOB"])
    rank = int(os.environ["RANK"])
    trained = Event()
    try:
        status = _train(folder, trained)
    except TryAgain as error:
        write(folder, Outcome("crashed", str(error), rank))
    except UnisonoError as error:
        kind: Kind = "user_error" if isinstance(error, UserError) else "failed"
        write(folder, Outcome(kind, str(error), rank))
    except BaseException as error:
        outcome = Outcome("crashed", in_words(error), rank, traceback=traceback.format_exc())
        if not trained.is_set() and not outcome.blames_a_peer:
            outcome = replace(outcome, kind="failed")  # before the first step: another attempt would end the same way
        write(folder, outcome)
    else:
        write(folder, Outcome(status, rank=rank))
        return 0
    flush_streams()
    os._exit(1)  # not by way of destructors, which may wait for a peer that is gone


def _train(folder: Path, trained: Event) -> Kind:
    from unisono.config.resolve import Resolved
    from unisono.engine.registry import load_recipe
    from unisono.engine.session import Start, run_session
    from unisono.settings import Settings

    job = json.loads((folder / "job.json").read_text())
    if "call" in job:
        return _call(job, Start(detect(), job["asked_devices"], folder, job["remarks"], trained))
    kind = load_recipe(job["recipe"])
    resolved = Resolved.from_json((Settings, kind.Config), job["resolved"])
    world = detect()
    result = run_session(kind, resolved, Start(world, job["asked_devices"], folder, job["remarks"], trained))
    if world.local_rank == 0:  # each machine has a job folder of its own
        (folder / "result.json").write_text(json.dumps({**asdict(result), "folder": str(result.folder)}))
    return "stopped" if result.status == "stopped" else "done"


def _call(job: dict[str, Any], start: Start) -> Kind:
    """A function that drives a run itself takes the place of a recipe; it ends a stopped run by exit code."""
    from unisono.engine.registry import load_object

    assert start.job_folder is not None
    status: Kind = "done"
    try:
        found = load_object(job["call"])(job["arguments"], start)
    except SystemExit as error:
        if error.code != EXIT_STOPPED:
            raise
        status, found = "stopped", None
    if start.world.local_rank == 0:
        (start.job_folder / "result.json").write_text(json.dumps(found))
    return status


if __name__ == "__main__":
    end_process(main())
