"""Decides what the script of `unisono slurm` does after an srun step: finish, restart or fail.

srun returns one number, the highest exit code of all tasks. With --kill-on-bad-exit, this is usually 143, the exit
code of a rank that srun itself killed, and does not show the cause. So each rank writes its outcome to the attempt's
folder without printing it, and the script calls `python -m unisono.engine.start.srun`, which prints the root cause and
decides.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from unisono import tracebacks
from unisono.cluster.lifetime import flush_streams
from unisono.cluster.outcome import Kind, Outcome, first_cause, read_all, write
from unisono.cluster.slurm.script import EXIT_AGAIN, EXIT_SMALLER, OUTCOMES
from unisono.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    TryAgain,
    TrySmaller,
    UnisonoError,
    UserError,
)
from unisono.formatting import describe_exception
from unisono.observe.folder import EVENTS, append_event

_NOT_STARTED = (2, 126, 127)  # srun's exit codes if it could not start the program


def with_outcome(train: Callable[[], int]) -> int:
    """Trains; under the script of `unisono slurm`, also writes the rank's outcome, and exits at once if it failed."""
    outcomes = os.environ.get(OUTCOMES)
    if not outcomes or not Path(outcomes).is_dir():
        return train()
    folder, rank = Path(outcomes), int(os.environ.get("SLURM_PROCID", "0"))

    def stop_before_the_start(signum: int, frame: FrameType | None) -> None:
        # The time limit is near and there is nothing to save yet. Training installs its own handler later.
        write(folder, Outcome("stopped", f"{signal.Signals(signum).name} before the first step", rank))
        os._exit(EXIT_STOPPED)

    signal.signal(signal.SIGUSR1, stop_before_the_start)
    try:
        code = train()
    except Exception as error:
        trace = "" if isinstance(error, UnisonoError) else tracebacks.format_short(error)
        write(folder, Outcome(_kind_of(error), describe_exception(error), rank, traceback=trace))
        flush_streams()
        os._exit(getattr(error, "exit_code", EXIT_FAILED))  # destructors may wait for a peer that has died
    write(folder, Outcome("stopped" if code == EXIT_STOPPED else "done", rank=rank))
    return code


def _kind_of(error: Exception) -> Kind:
    if isinstance(error, UserError) or getattr(error, "exit_code", None) == EXIT_USER_ERROR:
        return "user_error"
    if isinstance(error, TrySmaller):
        return "out_of_memory"
    return "failed" if isinstance(error, UnisonoError) and not isinstance(error, TryAgain) else "crashed"


def judge(folder: Path, run: Path, code: int, attempt: int, max_restarts: int) -> int:
    """Returns the script's exit code after srun returned `code`, and prints the reason.

    With EXIT_AGAIN or EXIT_SMALLER the script restarts the ranks. `attempt` counts the restarts so far, without those
    after running out of memory.
    """
    outcomes = read_all(folder) if folder.is_dir() else []
    kinds = {outcome.kind for outcome in outcomes}
    cause = first_cause(outcomes)
    if code == EXIT_DONE:
        return EXIT_DONE
    if not outcomes and code in _NOT_STARTED:
        _print(f"srun could not start the ranks (exit code {code}); see its message above")
        return code
    if cause is not None and cause.is_final:
        _print(cause.describe())
        return EXIT_USER_ERROR if cause.kind == "user_error" else EXIT_FAILED
    # The ranks exit together, after the last checkpoint: one rank's outcome applies to all, even if srun killed some of
    # them while they exited (it kills those that are slower than the first).
    if "stopped" in kinds:
        return EXIT_STOPPED
    if "done" in kinds:
        return EXIT_DONE
    description = _report_cause(cause, outcomes, code)
    if cause is not None and not cause.is_counted and max_restarts > 0:
        _print("restarting all ranks from the last checkpoint with a smaller micro-batch")
        append_event(run, "restart", attempt=attempt, cause=description)
        return EXIT_SMALLER
    if cause is not None and not cause.blames_a_peer and not _has_trained(run, folder):
        _print("this happened before the first step and would happen again: not restarting")
        return EXIT_FAILED
    if attempt >= max_restarts:
        _print(f"all {max_restarts} restarts are used up (--max_restarts)")
        return EXIT_FAILED
    _print(f"restarting all ranks from the last checkpoint ({attempt + 1} of {max_restarts})")
    append_event(run, "restart", attempt=attempt + 1, cause=description)
    return EXIT_AGAIN


def _report_cause(cause: Outcome | None, outcomes: Sequence[Outcome], code: int) -> str:
    """Prints the root cause and returns it in one line."""
    if cause is None or cause.blames_a_peer:
        ranks = range(int(os.environ.get("SLURM_NTASKS", "0")))
        silent = sorted(set(ranks) - {outcome.rank for outcome in outcomes})
        who = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent[:8]))}" if silent else "a rank"
        description = f"{who} died without an error message (srun: exit code {code})"
    else:
        description = cause.describe()
        if cause.traceback:
            print(cause.traceback, file=sys.stderr, end="")
    _print(description)
    return description


def _has_trained(run: Path, folder: Path) -> bool:
    """Whether this attempt finished a step: from then on, the run writes events.

    The parent folder's modification time shows when the attempt started, by the clock of the same file server.
    """
    try:
        return (run / EVENTS).stat().st_mtime_ns > folder.parent.stat().st_mtime_ns
    except OSError:
        return False


def _clear(folder: Path, run: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for empty in (folder.parent, run):
        with suppress(OSError):
            empty.rmdir()


def _print(text: str) -> None:
    print(f"unisono: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Parses FOLDER RUN CODE ATTEMPT MAX_RESTARTS, which the script passes, and returns its exit code."""
    folder, run = Path(argv[0]), Path(argv[1])
    code, attempt, max_restarts = map(int, argv[2:])
    try:
        return judge(folder, run, code, attempt, max_restarts)
    finally:
        _clear(folder, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
