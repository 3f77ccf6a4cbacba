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
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from unisono.cluster.agent import Agent, Job, Killed, Streams, say
from unisono.cluster.lifetime import LAUNCHER_PID
from unisono.cluster.ports import require_free
from unisono.cluster.signals import SAME_PRESS_S, STOP_SIGNALS
from unisono.errors import UserError

JOB = "UNISONO_JOB"
"""Variable that tells a rank the job's folder, and that unisono started it."""


def launch(
    command: list[str],
    *,
    nproc: int,
    nnodes: int = 1,
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
    max_restarts: int = 3,
    environ: dict[str, str],
    job_folder: Path,
    on_restart: Callable[[int, str], None] | None = None,
) -> int:
    """Runs `command` as `nproc` ranks on this machine (of `nnodes`) and returns the exit code of the run.

    `environ` is added to this process's environment. Ranks leave their outcome in `job_folder`
    (`unisono.cluster.outcome`) and end with status 0 if it is a good one. After a crash all ranks are started again, at
    most `max_restarts` times; `on_restart` gets the number of the restart and its cause.
    """
    job = Job(job_folder.resolve(), nnodes, on_restart)
    meeting = _meeting_point(nnodes, node_rank, rdzv_endpoint)
    if nnodes == 1 or node_rank == 0:
        job.clear()
    with _quiet_elastic():
        try:
            handler = get_rendezvous_handler(meeting)
        except (RendezvousError, DistError) as error:
            raise UserError(
                f"cannot meet the other machines at {rdzv_endpoint}; is machine 0 started, is a firewall between?"
            ) from error
        spec = WorkerSpec(
            role="rank",
            local_world_size=nproc,
            entrypoint=command[0],
            args=tuple(part.replace("$", "$$") for part in command[1:]),  # the agent expands $-macros in arguments
            rdzv_handler=handler,
            max_restarts=max_restarts,
            local_addr=meeting.local_addr,
        )
        agent = Agent(spec, Streams(_environment(environ, job, nproc)), job)
        try:
            with _Signals(agent):
                agent.run()
        except Killed as killed:
            return 128 + killed.signum
        except (RendezvousError, DistError) as error:
            if nnodes == 1:
                raise
            say(f"the other machines are gone ({type(error).__name__})")
        finally:
            with contextlib.suppress(RendezvousError, DistError):
                handler.shutdown()
    return agent.judge()


class _Signals:
    """While ranks run, SIGINT, SIGTERM and SIGUSR1 ask them to stop; SIGINT or SIGTERM again kills them."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._asked_at: float | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():  # python allows handlers only there
            for signum in STOP_SIGNALS:
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
            if not self._agent.job.stop_file.exists():
                self._agent.job.ask_to_stop(name)
                say(f"{name}: saving a checkpoint and stopping; Ctrl-C (again) stops at once, without saving")


def _environment(environ: dict[str, str], job: Job, nproc: int) -> dict[str, str]:
    environ = {**environ, JOB: str(job.folder), LAUNCHER_PID: str(os.getpid())}
    if "OMP_NUM_THREADS" not in environ and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        environ["OMP_NUM_THREADS"] = str(max(1, cores // nproc))
    return environ


def _meeting_point(nnodes: int, node_rank: int | None, endpoint: str | None) -> RendezvousParameters:
    if nnodes > 1 and (endpoint is None or node_rank is None):
        raise UserError(f"nnodes {nnodes} needs node_rank (0 to {nnodes - 1}) and rdzv_endpoint (machine 0, host:port)")
    if node_rank is not None and not 0 <= node_rank < nnodes:
        raise UserError(f"node_rank {node_rank} is not one of the {nnodes} machines; use 0 to {nnodes - 1}")
    hosts = nnodes == 1 or node_rank == 0
    host, _, port = (endpoint or "localhost:0").rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"rdzv_endpoint {endpoint!r} is not host:port, for instance node0:29400")
    if hosts and endpoint is not None:
        require_free(int(port), "rdzv_endpoint")
    return RendezvousParameters(
        backend="c10d",
        endpoint=f"{host}:{port}",
        run_id=uuid.uuid4().hex if nnodes == 1 else "unisono",
        min_nodes=nnodes,
        max_nodes=nnodes,
        local_addr="localhost" if nnodes == 1 else None,  # a laptop's own name often leads nowhere
        is_host=hosts,
        read_timeout=300,  # also how long a machine that starts early waits for machine 0
        join_timeout=900,
    )


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
