"""torch's elastic agent with this project's rules.

It starts the ranks of one machine, and after a death stops the survivors and starts all again. Added to it: what ranks
leave in the job's folder decides whether a restart makes sense; each attempt has a name of its own; all ranks can be
killed at once; what they print goes straight through.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext

from unisono.cluster import outcome as outcomes
from unisono.cluster.outcome import Outcome
from unisono.cluster.processes import ATTEMPT
from unisono.cluster.signals import STOP_FILE

# What the user may set although the agent sets it too; all else the agent sets says who a rank is.
_USERS_OWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


@dataclass
class Job:
    """What the launcher knows about the run."""

    folder: Path
    nnodes: int
    on_restart: Callable[[int, str], None] | None

    @property
    def stop_file(self) -> Path:
        """The file that asks the ranks to stop."""
        return self.folder / STOP_FILE

    def clear(self) -> None:
        """A new start knows nothing of an earlier one in the same folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stop_file.unlink(missing_ok=True)
        for path in self.folder.glob("outcome_rank*.json"):
            path.unlink()

    def ask_to_stop(self, signal_name: str) -> None:
        """Asks the ranks to save and stop at the next point where they decide together."""
        staged = self.stop_file.with_suffix(f".{os.getpid()}.tmp")
        staged.write_text(signal_name)
        staged.replace(self.stop_file)


class Streams(LogsSpecs):
    """Lets what ranks print straight through, and hands them their environment."""

    def __init__(self, environ: dict[str, str]) -> None:
        super().__init__()
        self.environ = environ

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by the agent with the variables of each rank, just before it starts them."""
        for env in envs.values():
            env.update({name: text for name, text in self.environ.items() if name not in env or name in _USERS_OWN})
        straight = dict.fromkeys(envs, "")
        return LogsDest(stdouts=straight, stderrs=straight, error_files=dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        """Where the agent would put log files; it writes none."""
        return os.devnull


class Killed(BaseException):
    """The user asked a second time. Not an Exception: nothing in between may swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Agent(LocalElasticAgent):
    """The elastic agent, restarting only where a restart can help."""

    def __init__(self, spec: WorkerSpec, streams: Streams, job: Job) -> None:
        super().__init__(spec, streams)
        self.job = job
        self.waits_for_machines = False
        self._streams = streams
        self._starting = False
        self._killed_by: int | None = None
        self._attempt = 0
        self._seen: list[Outcome] = []  # of the last attempt, with those of ranks that could not say anything

    def kill(self, signum: int) -> None:
        """Kills all ranks at once and leaves `run` by raising `Killed`."""
        self._killed_by = signum
        if self._starting:
            return  # some ranks have no handle yet; `_start_workers` comes back to it
        if isinstance(self._pcontext, SubprocessContext):
            for rank in self._pcontext.subprocess_handlers.values():
                if rank.proc.poll() is None:
                    # Each rank leads a session of its own, and its loader workers are in it.
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(rank.proc.pid, signal.SIGKILL)
        raise Killed(signum)

    def judge(self) -> int:
        """The exit code, from what the ranks left; a bad end is told with its cause."""
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        found = {seen.rank: seen for seen in self._seen}
        found.update({left.rank: left for left in outcomes.read_all(self.job.folder)})
        cause = outcomes.first_cause(list(found.values()))
        if cause is not None:
            if cause.traceback:
                print(cause.traceback.rstrip(), file=sys.stderr)
            say(cause.describe())
        elif missing := sorted(set(ranks) - set(found)):
            say(f"rank {missing[0]} ended without saying how")
        return outcomes.exit_code(list(found.values()), ranks)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.waits_for_machines = self.job.nnodes > 1
        super()._rendezvous(worker_group)
        self.waits_for_machines = False
        # Not the restart count: only the machine with the dead rank counts. The agents' store is new in each round.
        assert worker_group.store is not None
        if worker_group.group_rank == 0:
            worker_group.store.set("unisono/attempt", uuid.uuid4().hex)
        self._streams.environ[ATTEMPT] = worker_group.store.get("unisono/attempt").decode()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._starting = True
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            self._starting = False
        if self._killed_by is not None:
            self.kill(self._killed_by)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            left = {outcome.rank: outcome for outcome in outcomes.read_all(self.job.folder)}
            silent = {rank: failure.exitcode for rank, failure in result.failures.items() if rank not in left}
            self._seen = [*left.values(), *(_death(rank, status) for rank, status in silent.items())]
            all_good = all(seen.is_good for seen in self._seen)  # a rank that stumbled only on its way out
            final = any(seen.is_final for seen in self._seen)
            if all_good or final or self.job.stop_file.exists():
                self._remaining_restarts = 0
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        cause = outcomes.first_cause(self._seen)
        text = cause.describe() if cause is not None else "a rank on another machine died"
        outcomes.set_aside(self.job.folder, [worker.global_rank for worker in worker_group.workers], self._attempt)
        self._seen = []
        self._attempt += 1
        limit = worker_group.spec.max_restarts
        say(f"{text}; restarting all ranks from the last checkpoint ({self._attempt} of {limit})")
        if self.job.on_restart is not None:
            self.job.on_restart(self._attempt, text)
        super()._restart_workers(worker_group)


def say(line: str) -> None:
    """One line of the launcher to the user."""
    print(f"unisono: {line}", file=sys.stderr, flush=True)


def _death(rank: int, status: int) -> Outcome:
    """The outcome of a rank that left none."""
    if status >= 0:
        return Outcome("crashed", f"ended with status {status} without saying why", rank)
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = f"signal {-status}"
    hint = " (by hand, or by the system because memory ran out)" if -status == signal.SIGKILL else ""
    return Outcome("crashed", f"killed by {name}{hint}", rank)
