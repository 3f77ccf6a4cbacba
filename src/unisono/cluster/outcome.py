"""Records how a rank ended: done, stopped, user error, failed, crashed or out of memory.

Each rank writes its outcome to `outcome_rank<r>.json` in the job folder before it exits (`write`; the caller is
`engine/start/rank.py`). It exits with status 0 after a good end, also after a stop, because torch's elastic agent
treats any other status as a failure. A rank that is killed with -9 writes nothing; the launcher then derives its
outcome from the exit status (`death`).

From the outcomes of all ranks the launcher decides three things: the cause to report (`first_cause`, which prefers the
earliest failure that does not merely blame a peer), whether a restart can help (`Outcome.is_final`), and the exit code
of the run (`exit_code`). Before a restart it renames the files (`set_aside`), so that the next attempt starts clean.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from unisono.atomic_files import write_atomically
from unisono.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USER_ERROR
from unisono.formatting import LONGEST_MESSAGE, shorten_middle
from unisono.tracebacks import truncate_lines

Kind = Literal["done", "stopped", "user_error", "failed", "crashed", "out_of_memory"]

_EXIT_CODES: dict[Kind, int] = {
    "user_error": EXIT_USER_ERROR,
    "failed": EXIT_FAILED,
    "crashed": EXIT_FAILED,
    "out_of_memory": EXIT_FAILED,
    "stopped": EXIT_STOPPED,
    "done": EXIT_DONE,
}  # in order of precedence
_FILE = re.compile(r"outcome_rank(\d+)\.json")
# Messages of errors that a rank raises because a peer died. They are not the cause of a failure.
_PEER_DIED = re.compile(
    r"closed by peer|reset by peer|broken pipe|pair closure|ncclRemoteError|ncclSystemError"
    r"|remote process (has )?(exited|terminated)|remote server shutdown|failed to recv, got 0 bytes"
    r"|connection refused|timed out waiting|wait timeout|socket timeout|collective operation timeout"
    r"|process group watchdog|killed by SIGTERM",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    `done` and `stopped` (by a signal, with a checkpoint) are good ends. `user_error` and `failed` end the run. After
    `crashed` and `out_of_memory`, the launcher restarts all ranks from the last checkpoint.
    """

    kind: Kind
    message: str = ""
    rank: int = 0
    step: int | None = None
    traceback: str = ""
    # Use the wall clock, which is comparable between machines; a monotonic clock starts at boot.
    time: float = field(default_factory=time.time)

    @property
    def is_good(self) -> bool:
        """Whether the rank ended as it should."""
        return self.kind in ("done", "stopped")

    @property
    def is_final(self) -> bool:
        """Whether another attempt would end the same way."""
        return self.kind in ("user_error", "failed")

    @property
    def is_counted(self) -> bool:
        """Whether a restart after this outcome counts towards max_restarts. After out_of_memory it does not."""
        return self.kind != "out_of_memory"

    @property
    def blames_a_peer(self) -> bool:
        """Whether this looks like a consequence of another rank's death."""
        return self.kind == "crashed" and _PEER_DIED.search(self.message) is not None

    def describe(self) -> str:
        """Describes in one line what happened on which rank at which step."""
        if self.kind == "user_error":
            return self.message
        where = f"rank {self.rank}" if self.step is None else f"rank {self.rank}, step {self.step}"
        message = self.message if self.step is None else self.message.removeprefix(f"step {self.step}: ")
        return f"{where}: {message or self.kind}"


def write(job_folder: Path, outcome: Outcome) -> None:
    """Writes the outcome of a rank for the launcher."""
    shown = shorten_middle(outcome.message, 2 * LONGEST_MESSAGE)
    outcome = replace(outcome, message=shown, traceback=truncate_lines(outcome.traceback))
    path = _path(job_folder, outcome.rank)
    write_atomically(path, json.dumps(asdict(outcome)))


def read_all(job_folder: Path) -> list[Outcome]:
    """Returns the outcomes written so far, sorted by rank."""
    outcomes = []
    for path in job_folder.iterdir():
        if _FILE.fullmatch(path.name):
            values = json.loads(path.read_text())
            if values["kind"] not in get_args(Kind):
                raise ValueError(f"{path} contains an unknown kind of outcome: {values['kind']!r}")
            outcomes.append(Outcome(**values))
    return sorted(outcomes, key=lambda outcome: outcome.rank)


def set_aside(job_folder: Path, ranks: Collection[int], attempt: int) -> None:
    """Renames the outcome files of an attempt, so that the next attempt starts without any."""
    for rank in ranks:
        path = _path(job_folder, rank)
        if path.exists():
            path.replace(path.with_suffix(f".attempt{attempt}.json"))


def exit_code(outcomes: Sequence[Outcome], ranks: Collection[int]) -> int:
    """Returns the exit code of a run with these outcomes; a rank without one counts as failed."""
    kinds = {outcome.kind for outcome in outcomes}
    if set(ranks) - {outcome.rank for outcome in outcomes}:
        kinds.add("failed")
    return next((code for kind, code in _EXIT_CODES.items() if kind in kinds), EXIT_FAILED)


def first_cause(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Returns the earliest failure, preferring failures that do not merely report another rank's death."""
    failures = [outcome for outcome in outcomes if not outcome.is_good]
    return min(failures, key=lambda outcome: (outcome.blames_a_peer, outcome.time), default=None)


def death(rank: int, status: int, moment: float) -> Outcome:
    """Returns the outcome of a rank that wrote none, derived from its exit status; `moment` is when it died."""
    if status >= 0:
        return Outcome("crashed", f"exited with status {status} without an outcome", rank, time=moment)
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = f"signal {-status}"
    hint = " (by hand, or by the system because memory ran out)" if -status == signal.SIGKILL else ""
    return Outcome("crashed", f"killed by {name}{hint}", rank, time=moment)


def _path(job_folder: Path, rank: int) -> Path:
    return job_folder / f"outcome_rank{rank}.json"
