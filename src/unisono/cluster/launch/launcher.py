"""Launches the ranks of a run on this machine and returns the exit code of the run.

`launch` builds a rendezvous client (`rendezvous/client.py`; on machine 0 it also starts the rendezvous server) and an
elastic agent (`agent.py`), and runs the agent until the run ends. The agent detects dead and hanging ranks, kills the
others and restarts all of them; its docstring walks through a `kill -9`. This module adds:

- Signals. Ctrl-C and a scheduler's signals make the launcher write a stop file into the job folder, which every rank
  polls (`signals.py`). The launcher never forwards SIGTERM, which torch's agent uses to kill ranks.
- The exit code. Ranks write their outcome into the job folder and exit with status 0 after a good end, because torch's
  agent treats any other status as a failure. `Agent.exit_code` reads the outcomes.
- Output. torch's log lines are suppressed; the launcher prints one line per event.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

from unisono.cluster import alive
from unisono.cluster.hangs.diagnosis import Limits
from unisono.cluster.launch.agent import Agent, Job, KilledByUser, PassThroughLogs, RecordEvent, print_line
from unisono.cluster.lifetime import LAUNCHER_PID
from unisono.cluster.ports import require_free
from unisono.cluster.rendezvous.authentication import secret_of
from unisono.cluster.rendezvous.client import RendezvousClient, RendezvousConfig
from unisono.cluster.signals import SAME_PRESS_S, handling_stop_signals
from unisono.devices import num_cpu_cores
from unisono.errors import UserError

JOB = "UNISONO_JOB"
"""Environment variable: the job folder. A rank for which it is set was started by unisono's launcher."""


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
    record_event: RecordEvent | None = None,
    limits: Limits | None = None,
    run_folder: Path | None = None,
    join_timeout: float = 900.0,
    rendezvous_outside: bool = False,
) -> int:
    """Runs `command` as `nproc` ranks on this machine and returns the exit code of the run.

    `nnodes` is the number of machines, or a (minimum, maximum) pair, in which case the run continues with the machines
    that are available. The ranks inherit this process's environment, updated with `environ`. They write their outcomes
    to `job_folder` (`unisono.cluster.outcome`) and exit with status 0 after a good end. After a crash the agent
    restarts all ranks, at most `max_restarts` times, and calls `record_event`. A rank that makes no progress for longer
    than `limits` counts as crashed, and the stacks of all ranks are saved in `run_folder`. A machine waits at most
    `join_timeout` seconds for the others (0: no limit). With `rendezvous_outside`, the rendezvous server at
    `rdzv_endpoint` is not run by machine 0, but by a process outside of all machines (`RendezvousHost`).
    """
    fewest, most = (nnodes, nnodes) if isinstance(nnodes, int) else nnodes
    config = _rendezvous_config(fewest, most, node_rank, rdzv_endpoint, nproc)
    has_peers = most > 1 or rendezvous_outside
    secret = secret_of(os.environ) if has_peers else None
    config = replace(config, join_s=join_timeout, secret=secret, outside=rendezvous_outside)
    if config.machine == 0 and rdzv_endpoint is not None and not rendezvous_outside:
        require_free(config.port, "rdzv_endpoint")
    alive.beat()
    job = Job(job_folder.resolve(), most, record_event, limits or Limits(0, 0), run_folder)
    if config.machine == 0:
        job.clear()
    with _quiet_elastic():
        rendezvous = RendezvousClient(config, max_restarts, print_line)
        spec = WorkerSpec(
            role="rank",
            local_world_size=nproc,
            entrypoint=command[0],
            args=tuple(part.replace("$", "$$") for part in command[1:]),  # the agent expands $-macros in arguments
            rdzv_handler=rendezvous,
            max_restarts=max_restarts,
            local_addr="localhost",  # a laptop's host name often does not resolve, and nothing uses this address
        )
        agent = Agent(spec, PassThroughLogs(_environment(environ, job, nproc)), job)
        try:
            with handling_stop_signals(_OnSignal(agent)):
                result = agent.run()
            if result is None or result.is_failed():
                rendezvous.end_run("the run has failed on another machine; see its output for the cause")
        except KilledByUser as killed:
            return 128 + killed.signum
        except RendezvousClosedError as error:
            print_line(str(error) or "the run has ended on the other machines")
        except RendezvousError as error:
            if rendezvous.round is None:
                raise UserError(
                    f"cannot reach the other machines at {rdzv_endpoint}; is machine 0 started, and does a firewall "
                    "block the port?"
                ) from error
            print_line(f"{error}; run the same command again to continue from the last checkpoint")
        finally:
            rendezvous.shutdown()
    return agent.exit_code()


class _OnSignal:
    """The launcher's signal handler while ranks run.

    SIGINT, SIGTERM, SIGUSR1 and SIGHUP (unless it is ignored, as under nohup) ask the ranks to save and stop. A second
    SIGINT or SIGTERM kills them.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._first_signal_at: float | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        name = signal.Signals(signum).name
        # SIGUSR1 and SIGHUP never kill ranks, because a scheduler sends SIGUSR1 as a warning, after which ranks save,
        # and SIGTERM later.
        can_kill = signum in (signal.SIGINT, signal.SIGTERM)
        if can_kill and self._agent.waits_for_machines:
            print_line(f"{name}: no longer waiting for the other machines")
            self._agent.kill(signum)
        elif can_kill and self._first_signal_at is not None:
            if time.monotonic() - self._first_signal_at > SAME_PRESS_S:
                print_line(f"{name} again: killing all ranks")
                self._agent.kill(signum)
        else:
            if can_kill:
                self._first_signal_at = time.monotonic()
            if not self._agent.job.stopping:
                self._agent.job.stopping = True
                self._agent.job.ask_to_stop(name)
                print_line(f"{name}: saving a checkpoint and stopping; Ctrl-C (again) stops at once, without saving")


def _environment(environ: dict[str, str], job: Job, nproc: int) -> dict[str, str]:
    environ = {**environ, JOB: str(job.folder), LAUNCHER_PID: str(os.getpid())}
    if "OMP_NUM_THREADS" not in environ and "OMP_NUM_THREADS" not in os.environ:
        environ["OMP_NUM_THREADS"] = str(max(1, num_cpu_cores() // nproc))
    return environ


def _rendezvous_config(
    fewest: int, most: int, node_rank: int | None, endpoint: str | None, nproc: int
) -> RendezvousConfig:
    if most > 1 and (endpoint is None or node_rank is None):
        raise UserError(f"nnodes {most} needs node_rank (0 to {most - 1}) and rdzv_endpoint (host:port of machine 0)")
    if node_rank is not None and not 0 <= node_rank < most:
        raise UserError(f"node_rank {node_rank} is not one of the {most} machines; use 0 to {most - 1}")
    host, _, port = (endpoint or "localhost:0").rpartition(":")
    # Port 0 means any free port, which no other machine can know.
    is_port = re.fullmatch("[0-9]{1,5}", port) and (0 if endpoint is None else 1) <= int(port) <= 65535
    if not is_port or re.fullmatch(r"[^\s\ud800-\udfff]+", host) is None:
        raise UserError(f"rdzv_endpoint {endpoint!r} is not host:port, for instance node0:29400")
    return RendezvousConfig(node_rank or 0, nproc, fewest, most, host.strip("[]"), int(port))


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Disables the log lines of torch's agent, and its signal handlers, which would end a run without a checkpoint."""
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
