"""How a rank says what became of it.

The elastic agent only knows exit status 0 and "failure", so each rank leaves a small file in the job's folder before
it ends. The launcher makes of these files one exit code, the one cause worth telling, and the decision whether a
restart makes sense.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from unisono.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USER_ERROR

Kind = Literal["done", "stopped", "user_error", "failed", "crashed"]

_EXIT_CODES: dict[Kind, int] = {
    "user_error": EXIT_USER_ERROR,
    "failed": EXIT_FAILED,
    "crashed": EXIT_FAILED,
    "stopped": EXIT_STOPPED,
    "done": EXIT_DONE,
}  # in order of precedence
_LONGEST_MESSAGE, _MOST_LINES = 2_000, 50
_FILE = re.compile(r"outcome_rank(\d+)\.json")
# What a rank says whose peer died: true, and no help to anybody.
_PEER_DIED = re.compile(
    r"closed by peer|reset by peer|broken pipe|pair closure|ncclRemoteError|ncclSystemError"
    r"|remote process (has )?(exited|terminated)|remote server shutdown|failed to recv, got 0 bytes"
    r"|connection refused|timed out waiting|wait timeout|socket timeout|collective operation timeout"
    r"|process group watchdog|killed by SIGTERM",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Outcome:
    """What became of one rank.

    done and stopped (by a signal, with a checkpoint) are good ends; user_error and failed end the run; after crashed
    the launcher tries again from the last checkpoint.
    """

    kind: Kind
    message: str = ""
    rank: int = 0
    step: int | None = None
    traceback: str = ""
    # Wall clock, because the clocks of two machines agree about it (a monotonic clock starts at boot).
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
    def blames_a_peer(self) -> bool:
        """Whether this looks like the echo of another rank's death."""
        return self.kind == "crashed" and _PEER_DIED.search(self.message) is not None

    def describe(self) -> str:
        """One line: which rank, at which step, what."""
        if self.kind == "user_error":
            return self.message
        where = f"rank {self.rank}" if self.step is None else f"rank {self.rank}, step {self.step}"
        return f"{where}: {self.message or self.kind}"


def in_words(error: BaseException) -> str:
    """An exception in one line of bearable length, whatever its author has done to it."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(it cannot be shown)"
    return f"{type(error).__name__}: {_short(text, _LONGEST_MESSAGE)}"


def bearable(traceback: str) -> str:
    """A traceback whose message may be a book, in a length that people read."""
    lines = [_short(line, 400) for line in traceback.splitlines()]
    if len(lines) > 2 * _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"  … {len(lines) - 2 * _MOST_LINES} lines …", *lines[-_MOST_LINES:]]
    return "\n".join(lines)


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]} … {text[-longest // 2 :]}"


def write(job_folder: Path, outcome: Outcome) -> None:
    """Leaves the outcome of a rank for the launcher."""
    shown = _short(outcome.message, 2 * _LONGEST_MESSAGE)
    outcome = replace(outcome, message=shown, traceback=bearable(outcome.traceback))
    path = _path(job_folder, outcome.rank)
    staged = path.with_suffix(f".{os.getpid()}.tmp")
    staged.write_text(json.dumps(asdict(outcome)))
    staged.replace(path)


def read_all(job_folder: Path) -> list[Outcome]:
    """The outcomes left so far, by rank."""
    outcomes = []
    for path in job_folder.iterdir():
        if _FILE.fullmatch(path.name):
            values = json.loads(path.read_text())
            if values["kind"] not in get_args(Kind):
                raise ValueError(f"{path} holds an unknown kind of outcome: {values['kind']!r}")
            outcomes.append(Outcome(**values))
    return sorted(outcomes, key=lambda outcome: outcome.rank)


def set_aside(job_folder: Path, ranks: Collection[int], attempt: int) -> None:
    """Renames the outcomes of an attempt, so that the next attempt starts without any."""
    for rank in ranks:
        path = _path(job_folder, rank)
        if path.exists():
            path.replace(path.with_suffix(f".attempt{attempt}.json"))


def exit_code(outcomes: Sequence[Outcome], ranks: Collection[int]) -> int:
    """The exit code of a run whose `ranks` left these outcomes; a rank that left none counts as failed."""
    kinds = {outcome.kind for outcome in outcomes}
    if set(ranks) - {outcome.rank for outcome in outcomes}:
        kinds.add("failed")
    return next((code for kind, code in _EXIT_CODES.items() if kind in kinds), EXIT_FAILED)


def first_cause(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The failure that came first, leaving out those that only report another rank's death where possible."""
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    return min(bad, key=lambda outcome: (outcome.blames_a_peer, outcome.time), default=None)


def _path(job_folder: Path, rank: int) -> Path:
    return job_folder / f"outcome_rank{rank}.json"
