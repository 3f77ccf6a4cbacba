"""Calls SLURM's commands: submits a script, queries the state of a job, finds the address of a node.

Every command is a list of arguments, never a shell string. If a command fails, a UserError contains its error message.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import UserError
from unisono.formatting import format_count

_TIMEOUT_S = 60.0
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT", "STOPPED", "SIGNALING", "RESIZING"}


@dataclass(frozen=True)
class JobState:
    """The state of a job as SLURM reports it."""

    name: str  # PENDING, RUNNING, COMPLETED, FAILED, …
    reason: str = ""
    nodes: str = ""
    exit_code: int = 0
    restarts: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the job has ended and SLURM will not run it again."""
        return self.name not in _WAITING | _RUNNING

    def describe(self) -> str:
        """Describes the state in a short phrase for the terminal."""
        if self.name in _WAITING:
            return f"{self.name.lower()}{f' ({self.reason})' if self.reason else ''}"
        if self.name in _RUNNING:
            again = f", requeued {format_count(self.restarts, 'time')}" if self.restarts else ""
            return f"{self.name.lower()}{f' on {self.nodes}' if self.nodes else ''}{again}"
        return f"{self.name.lower()}{f', exit code {self.exit_code}' if self.exit_code else ''}"


def submit(script: Path) -> int:
    """Submits the script and returns the job id."""
    output = _call("sbatch", "--parsable", str(script))
    number = output.strip().partition(";")[0]  # "17" or "17;cluster"
    if not number.isdecimal():
        raise UserError(f"sbatch printed {output.strip()!r}, which is not a job id; see squeue")
    return int(number)


def job_state(job: int) -> JobState | None:
    """Returns the state of the job, or None if SLURM no longer knows it (some minutes after its end)."""
    try:
        output = _call("scontrol", "show", "job", "--oneliner", str(job))
    except UserError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    fields = dict(re.findall(r"(?:^|\s)(JobState|Reason|NodeList|ExitCode|Restarts)=(\S*)", output))
    code, _, by_signal = fields.get("ExitCode", "0:0").partition(":")
    return JobState(
        name=fields.get("JobState", "UNKNOWN"),
        reason=_value(fields.get("Reason", "")),
        nodes=_value(fields.get("NodeList", "")),
        exit_code=int(code) or (128 + int(by_signal) if by_signal not in ("", "0") else 0),
        restarts=int(fields.get("Restarts", "0")),
    )


def address_of(node: str) -> str:
    """Returns an address for a node: its name if that resolves, otherwise the address that SLURM itself uses.

    Most sites have SLURM's node names in DNS too; some (clouds, containers) know them only inside SLURM.
    """
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        pass
    if shutil.which("scontrol") is None:
        return node
    try:
        output = _call("scontrol", "show", "node", "--oneliner", node)
    except UserError:
        return node  # a later attempt to connect to the node will raise a better error
    match = re.search(r"(?:^|\s)NodeAddr=(\S+)", output)
    return match[1] if match else node


def _value(text: str) -> str:
    return "" if text in ("(null)", "None") else text


def _call(program: str, *arguments: str) -> str:
    try:
        process = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise UserError(f"{program} is not installed here; run this on a machine of the SLURM cluster") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{program} did not respond within {_TIMEOUT_S:.0f} s; is the SLURM controller up?") from None
    if process.returncode != 0:
        message = " ".join((process.stderr or process.stdout).split()) or f"exit code {process.returncode}"
        raise UserError(f"{program} failed: {message}")
    return process.stdout
