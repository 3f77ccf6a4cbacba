"""Starts the ranks of a run on this machine and looks after them until they end.

torch's elastic agent does the work (`unisono.cluster.agent`). Ctrl-C and a scheduler's signal ask the ranks to stop by
a file, because to the agent SIGTERM means something else; the exit code comes from what the ranks left in the job's
folder; and nothing is printed but one line when something happened.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

from unisono.cluster.agent import Agent, Job, Killed, Note, Streams, say
from unisono.cluster.hang import Limits
from unisono.cluster.lifetime import LAUNCHER_PID
from unisono.cluster.meeting import Meeting, Place
from unisono.cluster.ports import require_free
from unisono.cluster.signals import SAME_PRESS_S, stop_signals
from unisono.errors import UserError

JOB = "UNISONO_JOB"
"""Variable that tells a rank the job's folder, and that unisono started it."""


def launch(
    command: list[str],
    *,
    nproc: int,
    nnodes: int | tuple[int, int] = 1,
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
    max_restarts: int = 3,
    environ: dict[str, str],
    job_folder: Path,
    note: Note | None = None,
    limits: Limits | None = None,
    run_folder: Path | None = None,
) -> int:
    """Runs `command` as `nproc` ranks on this machine and returns the exit code of the run.

    `nnodes` is the number of machines, or the fewest and the most: then the run goes on with those that are there.
    `environ` is added to this process's environment. Ranks leave their outcome in `job_folder`
    (`unisono.cluster.outcome`) and end with status 0 if it is a good one. After a crash all ranks are started again, at
    most `max_restarts` times; `note` is told. A rank that stands still for longer than `limits` say counts as crashed,
    and stacks are kept in `run_folder`.
    """
    fewest, most = (nnodes, nnodes) if isinstance(nnodes, int) else nnodes
    place = _place(fewest, most, node_rank, rdzv_endpoint, nproc)
    job = Job(job_folder.resolve(), most, note, limits or Limits(0, 0), run_folder)
    if place.machine == 0:
        job.clear()
    with _quiet_elastic():
        meeting = Meeting(place, max_restarts, say)
        spec = WorkerSpec(
            role="rank",
            local_world_size=nproc,
            entrypoint=command[0],
            args=tuple(part.replace("$", "$$") for part in command[1:]),  # the agent expands $-macros in arguments
            rdzv_handler=meeting,
            max_restarts=max_restarts,
            local_addr="localhost",  # a laptop's own name often leads nowhere, and nobody asks for it
        )
        agent = Agent(spec, Streams(_environment(environ, job, nproc)), job)
        try:
            with _Signals(agent):
                result = agent.run()
            if result is None or result.is_failed():
                meeting.end("the run has failed on another machine, which says why")
        except Killed as killed:
            return 128 + killed.signum
        except RendezvousClosedError as error:
            say(str(error) or "the run has ended on the other machines")
        except RendezvousError as error:
            if meeting.round is None:
                raise UserError(
                    f"cannot meet the other machines at {rdzv_endpoint}; is machine 0 started, is a firewall between?"
                ) from error
            say(f"{error}; start the same command again to go on from the last checkpoint")
        finally:
            meeting.shutdown()
    return agent.judge()


class _Signals:
    """While ranks run, SIGINT, SIGTERM and SIGUSR1 ask them to stop; SIGINT or SIGTERM again kills them."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._asked_at: float | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():  # python allows handlers only there
            for signum in stop_signals():
                self._previous[signum] = signal.signal(signum, self._on_signal)

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._previous.items():
            # None: it was installed from C and cannot be put back from python
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        name = signal.Signals(signum).name
        # SIGUSR1 never kills: schedulers send it as a warning and SIGTERM later, while the ranks may still be saving.
        insists = signum in (signal.SIGINT, signal.SIGTERM)
        if insists and self._agent.waits_for_machines:
            say(f"{name}: no longer waiting for the other machines")
            self._agent.kill(signum)
        elif insists and self._asked_at is not None:
            if time.monotonic() - self._asked_at > SAME_PRESS_S:
                say(f"{name} again: killing all ranks")
                self._agent.kill(signum)
        else:
            if insists:
                self._asked_at = time.monotonic()
            if not self._agent.job.stopping:
                self._agent.job.stopping = True
                self._agent.job.ask_to_stop(name)
                say(f"{name}: saving a checkpoint and stopping; Ctrl-C (again) stops at once, without saving")


def _environment(environ: dict[str, str], job: Job, nproc: int) -> dict[str, str]:
    environ = {**environ, JOB: str(job.folder), LAUNCHER_PID: str(os.getpid())}
    if "OMP_NUM_THREADS" not in environ and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        environ["OMP_NUM_THREADS"] = str(max(1, cores // nproc))
    return environ


def _place(fewest: int, most: int, node_rank: int | None, endpoint: str | None, nproc: int) -> Place:
    if most > 1 and (endpoint is None or node_rank is None):
        raise UserError(f"nnodes {most} needs node_rank (0 to {most - 1}) and rdzv_endpoint (machine 0, host:port)")
    if node_rank is not None and not 0 <= node_rank < most:
        raise UserError(f"node_rank {node_rank} is not one of the {most} machines; use 0 to {most - 1}")
    host, _, port = (endpoint or "localhost:0").rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"rdzv_endpoint {endpoint!r} is not host:port, for instance node0:29400")
    machine = node_rank or 0
    if machine == 0 and endpoint is not None:
        require_free(int(port), "rdzv_endpoint")
    return Place(machine, nproc, fewest, most, host.strip("[]"), int(port))


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """No log lines from the agent, and no signal handlers of its own (they would end the run without a checkpoint)."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torchelastic-events-null")]
    propagated = [logger.propagate for logger in loggers]
    silence = logging.NullHandler()
    for logger in loggers:
        logger.addHandler(silence)
        logger.propagate = False
    before = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, propagated, strict=True):
            logger.removeHandler(silence)
            logger.propagate = propagate
        if before is None:
            del os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"]
        else:
            os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = before
