"""What becomes of a run under the script of `unisono slurm`: each rank says it, the script asks here what to do.

srun gives the script one number, the highest exit code of all tasks, and with --kill-on-bad-exit that is mostly the 143
of a rank that srun ended itself, whatever the cause was. So the ranks leave their outcomes in a folder of the attempt,
in silence, and `python -m unisono.engine.srun` (a line of the script) tells the one cause that matters and decides.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from unisono.cluster.lifetime import flush_streams
from unisono.cluster.outcome import Kind, Outcome, first_cause, read_all, write
from unisono.cluster.sbatch import EXIT_AGAIN, OUTCOMES
from unisono.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USER_ERROR, TryAgain, UnisonoError, UserError
from unisono.observe.folder import EVENTS, append_event

_NOT_STARTED = (2, 126, 127)  # srun's code when the program is not there


def with_outcome(train: Callable[[], int]) -> int:
    """Trains; under the script of `unisono slurm` the rank leaves its outcome and ends there when that is a bad one."""
    place = os.environ.get(OUTCOMES)
    if not place or not Path(place).is_dir():
        return train()
    folder, rank = Path(place), int(os.environ.get("SLURM_PROCID", "0"))

    def stop_before_the_start(signum: int, frame: FrameType | None) -> None:
        # The time limit is near and nothing has been trained yet: nothing to save. Training puts its own handler here.
        write(folder, Outcome("stopped", f"{signal.Signals(signum).name} before the first step", rank))
        os._exit(EXIT_STOPPED)

    signal.signal(signal.SIGUSR1, stop_before_the_start)
    try:
        code = train()
    except Exception as error:
        kind, message = _kind_of(error), " ".join(str(error).split())
        if not isinstance(error, UnisonoError):
            message = f"{type(error).__name__}: {message}"
        trace = "" if isinstance(error, UnisonoError) else traceback.format_exc()
        write(folder, Outcome(kind, message, rank, traceback=trace))
        flush_streams()
        os._exit(getattr(error, "exit_code", EXIT_FAILED))  # destructors may wait for a peer that is gone
    write(folder, Outcome("stopped" if code == EXIT_STOPPED else "done", rank=rank))
    return code


def _kind_of(error: Exception) -> Kind:
    if isinstance(error, UserError) or getattr(error, "exit_code", None) == EXIT_USER_ERROR:
        return "user_error"
    return "failed" if isinstance(error, UnisonoError) and not isinstance(error, TryAgain) else "crashed"


def judge(folder: Path, run: Path, code: int, attempt: int, max_restarts: int) -> int:
    """The exit code of an attempt that srun ended with `code`, or EXIT_AGAIN; says why on stderr."""
    outcomes = read_all(folder) if folder.is_dir() else []
    kinds = {outcome.kind for outcome in outcomes}
    cause = first_cause(outcomes)
    if code == EXIT_DONE:
        return EXIT_DONE
    if not outcomes and code in _NOT_STARTED:
        _say(f"srun could not start the ranks (exit code {code}); its own words stand above")
        return code
    if cause is not None and cause.is_final:
        _say(cause.describe())
        return EXIT_USER_ERROR if cause.kind == "user_error" else EXIT_FAILED
    # The ranks leave together, after the last checkpoint: what one says is true of all, whatever happened to some of
    # them on their way out (srun ends those that are slower than the first).
    if "stopped" in kinds:
        return EXIT_STOPPED
    if "done" in kinds:
        return EXIT_DONE
    what = _tell(cause, outcomes, code)
    if cause is not None and not cause.blames_a_peer and not _has_trained(run, folder):
        _say("this happened before the first step and would happen again; not tried again")
        return EXIT_FAILED
    if attempt >= max_restarts:
        _say(f"this was the last of {max_restarts} restarts (--max_restarts)")
        return EXIT_FAILED
    _say(f"starting all ranks again from the last checkpoint ({attempt + 1} of {max_restarts})")
    append_event(run, "restart", attempt=attempt + 1, cause=what)
    return EXIT_AGAIN


def _tell(cause: Outcome | None, outcomes: Sequence[Outcome], code: int) -> str:
    """Says, and returns in one line, what went wrong first."""
    if cause is None or cause.blames_a_peer:
        ranks = range(int(os.environ.get("SLURM_NTASKS", "0")))
        silent = sorted(set(ranks) - {outcome.rank for outcome in outcomes})
        who = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent[:8]))}" if silent else "a rank"
        what = f"{who} died without a word (srun: exit code {code})"
    else:
        what = cause.describe()
        if cause.traceback:
            print(cause.traceback, file=sys.stderr, end="")
    _say(what)
    return what


def _has_trained(run: Path, folder: Path) -> bool:
    """Whether this attempt finished a step: the run's events are written to from then on.

    The folder's parent was last changed when the script made the folder, by the same file server's clock.
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


def _say(text: str) -> None:
    print(f"unisono: {text}", file=sys.stderr, flush=True)


def main(words: Sequence[str]) -> int:
    """`FOLDER RUN CODE ATTEMPT MAX_RESTARTS`, as the script calls it."""
    folder, run = Path(words[0]), Path(words[1])
    code, attempt, max_restarts = map(int, words[2:])
    try:
        return judge(folder, run, code, attempt, max_restarts)
    finally:
        _clear(folder, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
