"""Talking to SLURM: submit a script, ask how a job is, find the address of a node.

Every command is a list of words, never a shell string; its one line of complaint becomes ours.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import UserError

_PATIENCE_S = 60.0
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT", "STOPPED", "SIGNALING", "RESIZING"}


@dataclass(frozen=True)
class JobState:
    """What SLURM says of a job."""

    name: str  # PENDING, RUNNING, COMPLETED, FAILED, …
    reason: str = ""
    nodes: str = ""
    exit_code: int = 0
    restarts: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the job will not run again by itself."""
        return self.name not in _WAITING | _RUNNING

    def describe(self) -> str:
        """The state in a few words, for a line on the terminal."""
        if self.name in _WAITING:
            return f"{self.name.lower()}{f' ({self.reason})' if self.reason else ''}"
        if self.name in _RUNNING:
            again = f", requeued {self.restarts} time{'s' * (self.restarts > 1)}" if self.restarts else ""
            return f"{self.name.lower()}{f' on {self.nodes}' if self.nodes else ''}{again}"
        return f"{self.name.lower()}{f', exit code {self.exit_code}' if self.exit_code else ''}"


def submit(script: Path) -> int:
    """Submits the script and returns the job's number."""
    said = _ask("sbatch", "--parsable", str(script))
    number = said.strip().partition(";")[0]  # "17" or "17;cluster"
    if not number.isdecimal():
        raise UserError(f"sbatch answered {said.strip()!r}, which is no job number; see squeue")
    return int(number)


def job_state(job: int) -> JobState | None:
    """How the job is; None when SLURM has forgotten it (some minutes after its end)."""
    try:
        said = _ask("scontrol", "show", "job", "--oneliner", str(job))
    except UserError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    found = dict(re.findall(r"(?:^|\s)(JobState|Reason|NodeList|ExitCode|Restarts)=(\S*)", said))
    code, _, by_signal = found.get("ExitCode", "0:0").partition(":")
    return JobState(
        name=found.get("JobState", "UNKNOWN"),
        reason=_known(found.get("Reason", "")),
        nodes=_known(found.get("NodeList", "")),
        exit_code=int(code) or (128 + int(by_signal) if by_signal not in ("", "0") else 0),
        restarts=int(found.get("Restarts", "0")),
    )


def address_of(node: str) -> str:
    """Where a node can be reached: its name if the network knows it, otherwise the address SLURM itself uses.

    Node names are SLURM's own; most sites give them to DNS too, and some (clouds, containers) only to SLURM.
    """
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        pass
    if shutil.which("scontrol") is None:
        return node
    try:
        said = _ask("scontrol", "show", "node", "--oneliner", node)
    except UserError:
        return node  # whoever connects to it says what is wrong
    match = re.search(r"(?:^|\s)NodeAddr=(\S+)", said)
    return match[1] if match else node


def _known(text: str) -> str:
    return "" if text in ("(null)", "None") else text


def _ask(program: str, *words: str) -> str:
    try:
        answer = subprocess.run(
            [program, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except FileNotFoundError:
        raise UserError(f"{program} is not installed here; run this on a machine of the SLURM cluster") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{program} gave no answer in {_PATIENCE_S:.0f} s; is the SLURM controller up?") from None
    if answer.returncode != 0:
        complaint = " ".join((answer.stderr or answer.stdout).split()) or f"exit code {answer.returncode}"
        raise UserError(f"{program} refused: {complaint}")
    return answer.stdout
