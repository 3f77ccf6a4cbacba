"""The elastic agent of one machine: starts its ranks, notices when one dies or hangs, and restarts all of them.

`Agent` extends torch's `LocalElasticAgent`. torch's loop (`SimpleElasticAgent._invoke_run`) calls `_monitor_workers`
ten times per second and acts on the result. After SUCCEEDED, it ends the run. After FAILED, it calls `_restart_workers`
if any restarts are left. After HEALTHY, it asks the rendezvous whether this machine has to regroup
(`num_nodes_waiting`), and if so restarts as well. `_restart_workers` stops the ranks, calls `_rendezvous` for the next
round and then `_start_workers`.

After `kill -9` of rank 1 on machine 1 of two:

1. Machine 1: `_monitor_workers` polls the processes. `_outcomes_after_death` finds rank 1 dead without an
   `outcome_rank1.json` in the job folder and builds its outcome from the exit status ("killed by SIGKILL") and its last
   heartbeat (the step). Ranks that fail because they lost rank 1 write outcomes that blame a peer; `first_cause`
   ignores these.
2. `_kill_ranks` sends SIGKILL to the sessions of all other ranks of machine 1, and the method returns FAILED.
3. `_restart_workers` renames the outcome files (`outcome.set_aside`), prints the cause, and puts it into the rendezvous
   client, whose `next_rendezvous` sends it to machine 0 with `ready`.
4. Machine 0: its rendezvous server then sends `regroup: now` to every other machine. There `num_nodes_waiting` becomes
   1, and the agent kills its ranks and calls `next_rendezvous` too. (If these ranks notice the closed connections
   first, they die with outcomes that only blame a peer, and the agent continues in the same way.)
5. When all machines have sent `ready`, the server counts one restart and sends the same `Round` to all. `_rendezvous`
   puts the round's name into the ranks' environment and computes how many restarts are left.
6. `_start_workers` starts the ranks. Each runs the same command, opens the run folder and continues from the last
   committed checkpoint (`engine/run_folder/choose_checkpoint.py`). The launcher does not deal with checkpoints.

Only the machine of rank 0 records the restart in the run's `events.jsonl`. If no restart is left, or an outcome is
final (a user error, a failure that would repeat), the agent stops and `Agent.exit_code` derives the exit code from the
outcomes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext

from unisono.atomic_files import write_atomically
from unisono.cluster import alive
from unisono.cluster import outcome as outcomes
from unisono.cluster.environment import ROUND
from unisono.cluster.hangs.diagnosis import Limits
from unisono.cluster.hangs.heartbeat import clear_heartbeats
from unisono.cluster.hangs.launcher_monitor import HangMonitor
from unisono.cluster.hangs.stacks import FILES_S, clear_stacks, finishes_within
from unisono.cluster.launch.job_folder import collect_outcomes
from unisono.cluster.outcome import Outcome
from unisono.cluster.process_group import ATTEMPT
from unisono.cluster.rendezvous.client import RendezvousClient
from unisono.cluster.rendezvous.server import Round
from unisono.cluster.signals import STOP_FILE, stop_signals
from unisono.typed_paths import as_typed

# Variables for which the user's value takes precedence; all other variables that the agent sets identify a rank.
_USER_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
_CAUSE_WAIT_S = 1.0  # seconds to wait for a peer's death to become visible after a rank has blamed that peer
_ANNOUNCE_S = 1.0  # seconds for all machines to receive machine 0's decision
_KILL_WAIT_S = 10.0  # seconds for killed ranks to exit; a rank blocked in the kernel may never do so

RecordEvent = Callable[[str, Mapping[str, Any]], None]
"""Records an event of the run: its kind ("restart", "hang", "machines") and its details."""


@dataclass
class Job:
    """The launcher's parameters and state of the run."""

    folder: Path
    nnodes: int
    record_event: RecordEvent | None = None
    limits: Limits = field(default_factory=lambda: Limits(0, 0))  # how long a rank may go without progress
    run_folder: Path | None = None  # folder in which stacks are saved
    stopping: bool = False  # set if the user or a scheduler asked the run to stop

    @property
    def stop_file(self) -> Path:
        """The file that asks the ranks to stop."""
        return self.folder / STOP_FILE

    def clear(self) -> None:
        """Removes the files of an earlier start from the job folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stop_file.unlink(missing_ok=True)
        for path in self.folder.glob("outcome_rank*.json"):
            path.unlink()

    def ask_to_stop(self, signal_name: str) -> None:
        """Asks the ranks to save and stop at the next step at which all ranks agree on it."""
        write_atomically(self.stop_file, signal_name)


class PassThroughLogs(LogsSpecs):
    """Lets the ranks write to the launcher's stdout and stderr, and completes their environment."""

    def __init__(self, environ: dict[str, str]) -> None:
        super().__init__()
        self.environ = environ

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Completes the environment variables of each rank; the agent calls it just before it starts the ranks."""
        for env in envs.values():
            env.update(
                {name: text for name, text in self.environ.items() if name not in env or name in _USER_VARIABLES}
            )
        not_redirected = dict.fromkeys(envs, "")
        return LogsDest(stdouts=not_redirected, stderrs=not_redirected, error_files=dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        """The folder for the agent's log files, of which there are none."""
        return os.devnull


class KilledByUser(BaseException):
    """The user sent a second signal. Not an Exception, so that no `except Exception` can swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Agent(LocalElasticAgent):
    """torch's elastic agent, changed to restart only where a restart can help."""

    def __init__(self, spec: WorkerSpec, logs: PassThroughLogs, job: Job) -> None:
        super().__init__(spec, logs)
        self.job = job
        assert isinstance(spec.rdzv_handler, RendezvousClient)
        self._rendezvous_client = spec.rdzv_handler
        self._regrouping_since: float | None = None  # when the ranks were first asked to save for machines that join
        self.waits_for_machines = False
        self._logs = logs
        self._starting = False
        self._killed_by: int | None = None
        self._attempt = 0
        self._previous_cause: tuple[int, int | None, str] | None = None
        self._hang_monitor = self._new_hang_monitor()
        self._outcomes: list[Outcome] = []  # outcomes of the last attempt, including ranks that could not write one

    def kill(self, signum: int) -> None:
        """Kills all ranks at once and leaves `run` by raising `KilledByUser`."""
        self._killed_by = signum
        if self._starting:
            return  # some ranks have no handle yet; `_start_workers` kills all ranks once they are started
        self._kill_ranks()
        raise KilledByUser(signum)

    def exit_code(self) -> int:
        """Returns the exit code that follows from the ranks' outcomes; prints and records the cause of a failure."""
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        by_rank = {outcome.rank: outcome for outcome in outcomes.read_all(self.job.folder)}
        by_rank.update({outcome.rank: outcome for outcome in self._outcomes})  # these outcomes contain the step
        cause = outcomes.first_cause(list(by_rank.values()))
        if cause is not None:
            text = self._print_cause(cause, "")
            if cause.kind != "user_error":  # after a user error, the run folder may belong to another run
                self._record_event("failed", {"step": cause.step, "rank": cause.rank, "error": text})
        elif missing := sorted(set(ranks) - set(by_rank)):
            print_line(f"rank {missing[0]} exited without writing an outcome")
        return outcomes.exit_code(list(by_rank.values()), ranks)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.waits_for_machines = self.job.nnodes > 1
        super()._rendezvous(worker_group)
        self.waits_for_machines = False
        new_round = self._rendezvous_client.round
        assert new_round is not None
        self._logs.environ.update({ATTEMPT: new_round.name, ROUND: str(new_round.number)})
        # Machine 0 counts restarts for all machines; a machine that joins or leaves does not count as one.
        self._remaining_restarts = max(0, worker_group.spec.max_restarts - new_round.num_restarts)
        self._announce_round(new_round)

    def _announce_round(self, new_round: Round) -> None:
        """Prints why all ranks restart, unless this machine has printed it; the machine of rank 0 records it."""
        own_cause, self._rendezvous_client.cause = self._rendezvous_client.cause, None
        if new_round.joined or new_round.left:
            print_line(new_round.describe_change())
            machines = [machine for machine, _ in new_round.machines]
            details: dict[str, Any] = {"joined": new_round.joined, "left": new_round.left, "machines": machines}
            kind = "machines"
        elif new_round.number > 1:
            cause = next(iter(new_round.causes), {"cause": "ranks on different machines lost their connection"})
            if own_cause is None:
                print_line(f"{cause['cause']}; restarting all ranks from the last checkpoint")
            kind, details = "restart", {"attempt": new_round.num_restarts, **cause}
        else:
            return
        if self._worker_group.group_rank == 0:
            self._record_event(kind, details)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Numbers the ranks by machine. The round lists each machine's ranks, so agents exchange nothing here."""
        assert self._rendezvous_client.round is not None
        sizes = [ranks for _, ranks in self._rendezvous_client.round.machines]
        first, world = sum(sizes[:group_rank]), sum(sizes)
        return [Worker(local, first + local, first + local, world, world) for local in range(spec.local_world_size)]

    def _exit_barrier(self) -> None:
        self._rendezvous_client.finish()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ranks = [worker.global_rank for worker in worker_group.workers]
        clear_heartbeats(self.job.folder, ranks)
        clear_stacks(self.job.folder, ranks)
        self._hang_monitor = self._new_hang_monitor()
        self._starting = True
        try:
            with _own_handlers_restored():
                started: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            self._starting = False
        if self._killed_by is not None:
            self.kill(self._killed_by)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        alive.beat()
        ranks = self._ranks()
        if self._rendezvous_client.wants_checkpoint:
            self._save_for_joining_machines(worker_group)
        deaths = self._outcomes_after_death(ranks)
        if not deaths and any(process.poll() is None for process in ranks.values()):
            hang = self._check_for_hang(ranks)
            if hang is None:
                return RunResult(state=WorkerState.HEALTHY)
            deaths = [hang]
        if deaths:
            self._kill_ranks()  # kills them here, because torch would give the survivors 30 s to exit
        result: RunResult = super()._monitor_workers(worker_group)
        if deaths:
            result.state = WorkerState.FAILED
            self._outcomes = deaths
            all_good = all(outcome.is_good for outcome in deaths)  # a rank that had finished and crashed while exiting
            final = any(outcome.is_final for outcome in deaths)
            if all_good or final or self.job.stopping:
                self._remaining_restarts = 0
            elif self.job.nnodes > 1 and all(outcome.is_good or outcome.blames_a_peer for outcome in deaths):
                # Another machine may be gone. The rendezvous server decides whether this counts as a restart, and
                # whether any is left.
                self._remaining_restarts = max(1, self._remaining_restarts)
            elif self._restarts_uncounted(outcomes.first_cause(deaths)):
                self._remaining_restarts = max(1, self._remaining_restarts)
        elif result.state == WorkerState.SUCCEEDED and self._stopped_for_joining_machines():
            self._rendezvous_client.leave_round()
            return RunResult(state=WorkerState.HEALTHY)  # the agent begins a new round, as `num_nodes_waiting` is now 1
        return result

    def _restarts_uncounted(self, cause: Outcome | None) -> bool:
        """Whether the restart does not count because the next attempt needs less memory; False if max_restarts is 0."""
        return cause is not None and not cause.is_counted and self._worker_group.spec.max_restarts > 0

    def _save_for_joining_machines(self, worker_group: WorkerGroup) -> None:
        """Asks the ranks to save and stop, so that no step is lost when they restart with the machines that join."""
        if self._regrouping_since is None:
            self._regrouping_since = time.monotonic()
        # One machine is enough, because the ranks agree to stop. It waits, so that all agents know the reason first.
        due = worker_group.group_rank == 0 and time.monotonic() - self._regrouping_since > _ANNOUNCE_S
        if due and not self.job.stop_file.exists():
            self.job.ask_to_stop("a machine joins")

    def _stopped_for_joining_machines(self) -> bool:
        """Whether all ranks stopped so that machines can join, not because the run is done or the user stopped it."""
        all_stopped = all(outcome.kind == "stopped" for outcome in outcomes.read_all(self.job.folder))
        return self._regrouping_since is not None and not self.job.stopping and all_stopped

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        cause = outcomes.first_cause(self._outcomes)
        outcomes.set_aside(self.job.folder, [worker.global_rank for worker in worker_group.workers], self._attempt)
        self._outcomes = []
        self._attempt += 1
        self._regrouping_since = None
        if not self.job.stopping:
            self.job.stop_file.unlink(missing_ok=True)
        limit = worker_group.spec.max_restarts
        if cause is not None and not (self.job.nnodes > 1 and cause.blames_a_peer):
            number = f"({limit - self._remaining_restarts} of {limit})" if cause.is_counted else "(not counted)"
            text = self._print_cause(cause, f"; restarting all ranks from the last checkpoint {number}")
            self._rendezvous_client.cause = {"rank": cause.rank, "step": cause.step, "cause": text}
            if not cause.is_counted:
                self._rendezvous_client.cause["counted"] = False
        super()._restart_workers(worker_group)

    def _shutdown(self, *arguments: Any, **options: Any) -> None:  # the arguments differ between versions of torch
        super()._shutdown(signal.SIGKILL)  # not SIGTERM, which asks a rank to save and stop

    def _ranks(self) -> dict[int, subprocess.Popen[Any]]:
        """Returns the processes of this machine's ranks, by global rank."""
        if not isinstance(self._pcontext, SubprocessContext):
            return {}
        handlers = self._pcontext.subprocess_handlers
        workers = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        return {workers[local_rank]: handler.proc for local_rank, handler in handlers.items()}

    def _kill_ranks(self) -> None:
        ranks = self._ranks().values()
        for process in ranks:
            if process.poll() is None:
                # Each rank leads its own session, which includes its loader workers.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_WAIT_S
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _outcomes_after_death(self, ranks: Mapping[int, subprocess.Popen[Any]]) -> list[Outcome]:
        """Returns the outcomes of all ranks once one rank has died; an empty list before that."""
        deadline = time.monotonic() + _CAUSE_WAIT_S
        while True:
            exited = {rank: status for rank, process in ranks.items() if (status := process.poll()) is not None}
            written = {outcome.rank for outcome in outcomes.read_all(self.job.folder)}
            # Status 0 without an outcome counts as a death: the recipe, or a library, has ended the process.
            died = {rank: status for rank, status in exited.items() if status != 0 or rank not in written}
            if not died:
                return []
            collected = collect_outcomes(self.job.folder, died)
            cause = outcomes.first_cause(collected)
            if cause is None and any(process.poll() is None for process in ranks.values()):
                return []  # the rank had finished and crashed while exiting; the others still work
            if cause is None or not cause.blames_a_peer or len(ranks) == len(died) or time.monotonic() > deadline:
                return collected
            time.sleep(0.02)

    def _new_hang_monitor(self) -> HangMonitor:
        return HangMonitor(self.job.folder, self.job.limits, self.job.run_folder, print_line)

    def _check_for_hang(self, ranks: Mapping[int, subprocess.Popen[Any]]) -> Outcome | None:
        """Returns the outcome of the rank that hangs, which counts as its death; None if no rank hangs."""
        alive = {rank: process.pid for rank, process in ranks.items() if process.poll() is None}
        several = (self._worker_group.group_world_size or 1) > 1
        hang = self._hang_monitor.check(alive, attempt=self._attempt, other_machines=several)
        if hang is None:
            return None
        self._record_event("hang", hang.event())
        return hang.outcome()

    def _print_cause(self, cause: Outcome, ending: str) -> str:
        """Prints the cause, whether it equals the previous one, and `ending`; returns the text without `ending`."""
        key = cause.rank, cause.step, cause.message.partition(";")[0]
        again = " (the same as before)" if key == self._previous_cause else ""
        self._previous_cause = key
        if cause.traceback:
            with contextlib.suppress(OSError):
                print(cause.traceback.rstrip(), file=sys.stderr, flush=True)
        text = cause.describe() + again
        print_line(text + ending)
        return text

    def _record_event(self, kind: str, details: Mapping[str, Any]) -> None:
        record_event = self.job.record_event
        if record_event is not None:
            finishes_within(FILES_S, lambda: record_event(kind, details))


@contextlib.contextmanager
def _own_handlers_restored() -> Iterator[None]:
    """Restores the launcher's signal handlers at the end, because torch 2.9 replaces them whenever it starts ranks."""
    # stop_signals() omits SIGHUP if it is ignored, as under nohup. Save SIGHUP anyway: if torch's handler stayed
    # installed, a hangup would end the run.
    handlers = {signum: signal.getsignal(signum) for signum in {*stop_signals(), signal.SIGHUP, signal.SIGQUIT}}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only in this thread
            for signum, handler in handlers.items():
                if handler is not None:  # None: the handler was installed from C, and Python cannot restore it
                    signal.signal(signum, handler)


def print_line(line: str) -> None:
    """Prints one line of the launcher to stderr."""
    with contextlib.suppress(OSError):  # the terminal may be closed
        print(as_typed(f"unisono: {line}"), file=sys.stderr, flush=True)
