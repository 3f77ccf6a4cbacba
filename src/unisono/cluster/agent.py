"""torch's elastic agent with this project's rules.

It starts the ranks of one machine, and after a death stops the survivors and starts all again. Added to it: what ranks
leave in the job's folder decides whether a restart makes sense; each attempt has a name of its own; a rank that hangs
counts as dead, with its stack as the cause; survivors are killed at once, because nothing they could still do would
count; what ranks print goes straight through.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext

from unisono.cluster import outcome as outcomes
from unisono.cluster.environment import ROUND
from unisono.cluster.hang import Limits, beats_of
from unisono.cluster.lookout import Lookout
from unisono.cluster.meeting import Meeting
from unisono.cluster.meeting_point import Round
from unisono.cluster.outcome import Outcome
from unisono.cluster.processes import ATTEMPT
from unisono.cluster.pulse import forget_pulses
from unisono.cluster.signals import STOP_FILE, stop_signals
from unisono.cluster.stacks import FILES_S, forget_stacks, within

# What the user may set although the agent sets it too; all else the agent sets says who a rank is.
_USERS_OWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
_LAST_WORDS_S = 1.0  # when a rank only says that a peer is gone: for that peer to be seen dead
_ALL_KNOW_S = 1.0  # for all machines to have heard what machine 0 has decided
_DYING_S = 10.0  # for killed ranks to be gone; one inside the kernel may never be

Note = Callable[[str, Mapping[str, Any]], None]
"""Told what happened, as an event of the run: its kind ("restart", "hang", "machines") and its details."""


@dataclass
class Job:
    """What the launcher knows about the run."""

    folder: Path
    nnodes: int
    note: Note | None = None
    limits: Limits = field(default_factory=lambda: Limits(0, 0))  # how long a rank may stand still
    run_folder: Path | None = None  # where stacks are kept
    stopping: bool = False  # because the user, or a scheduler, asked for it

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
        assert isinstance(spec.rdzv_handler, Meeting)
        self._meeting = spec.rdzv_handler
        self._regrouping_since: float | None = None  # machines want to join: the ranks save and stop for them
        self.waits_for_machines = False
        self._streams = streams
        self._starting = False
        self._killed_by: int | None = None
        self._attempt = 0
        self._cause_before: tuple[int, int | None, str] | None = None
        self._lookout = self._new_lookout()
        self._seen: list[Outcome] = []  # of the last attempt, with those of ranks that could not say anything

    def kill(self, signum: int) -> None:
        """Kills all ranks at once and leaves `run` by raising `Killed`."""
        self._killed_by = signum
        if self._starting:
            return  # some ranks have no handle yet; `_start_workers` comes back to it
        self._kill_ranks()
        raise Killed(signum)

    def judge(self) -> int:
        """The exit code, from what the ranks left; a bad end is told with its cause."""
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        found = {left.rank: left for left in outcomes.read_all(self.job.folder)}
        found.update({seen.rank: seen for seen in self._seen})  # these know the step too
        cause = outcomes.first_cause(list(found.values()))
        if cause is not None:
            text = self._tell(cause, "")
            if cause.kind != "user_error":  # whose folder may be another run's
                self._note("failed", {"step": cause.step, "rank": cause.rank, "error": text})
        elif missing := sorted(set(ranks) - set(found)):
            say(f"rank {missing[0]} ended without saying how")
        return outcomes.exit_code(list(found.values()), ranks)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.waits_for_machines = self.job.nnodes > 1
        super()._rendezvous(worker_group)
        self.waits_for_machines = False
        found = self._meeting.round
        assert found is not None
        self._streams.environ.update({ATTEMPT: found.name, ROUND: str(found.number)})
        # Machine 0 counts for all; machines that come and go are no restarts.
        self._remaining_restarts = max(0, worker_group.spec.max_restarts - found.num_restarts)
        self._tell_round(found)

    def _tell_round(self, found: Round) -> None:
        """Why all ranks are started again, where this machine has not said so yet."""
        mine, self._meeting.cause = self._meeting.cause, None
        if found.joined or found.left:
            say(found.describe_change())
            here = [machine for machine, _ in found.machines]
            details: dict[str, Any] = {"joined": found.joined, "left": found.left, "machines": here}
            kind = "machines"
        elif found.number > 1:
            cause = next(iter(found.causes), {"cause": "ranks on different machines lost each other"})
            if mine is None:
                say(f"{cause['cause']}; restarting all ranks from the last checkpoint")
            kind, details = "restart", {"attempt": found.num_restarts, **cause}
        else:
            return
        if self._meeting.is_host:  # once for all machines
            self._note(kind, details)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Numbers the ranks by machine; the meeting has told how many each has, so that nobody waits for anybody."""
        assert self._meeting.round is not None
        sizes = [ranks for _, ranks in self._meeting.round.machines]
        first, world = sum(sizes[:group_rank]), sum(sizes)
        return [Worker(local, first + local, first + local, world, world) for local in range(spec.local_world_size)]

    def _exit_barrier(self) -> None:
        self._meeting.finish()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ranks = [worker.global_rank for worker in worker_group.workers]
        forget_pulses(self.job.folder, ranks)
        forget_stacks(self.job.folder, ranks)
        self._lookout = self._new_lookout()
        self._starting = True
        try:
            with _handlers_kept():
                started: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            self._starting = False
        if self._killed_by is not None:
            self.kill(self._killed_by)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ranks = self._ranks()
        if self._meeting.wants_a_checkpoint:
            self._make_room(worker_group)
        deaths = self._deaths(ranks)
        if not deaths and any(process.poll() is None for process in ranks.values()):
            hung = self._find_hang(ranks)
            if hung is None:
                return RunResult(state=WorkerState.HEALTHY)
            deaths = [hung]
        if deaths:
            self._kill_ranks()  # not left to torch, which gives survivors 30 s to end by themselves
        result: RunResult = super()._monitor_workers(worker_group)
        if deaths:
            result.state = WorkerState.FAILED
            self._seen = deaths
            all_good = all(seen.is_good for seen in deaths)  # a rank that stumbled only on its way out
            final = any(seen.is_final for seen in deaths)
            if all_good or final or self.job.stopping:
                self._remaining_restarts = 0
            elif self.job.nnodes > 1 and all(seen.is_good or seen.blames_a_peer for seen in deaths):
                # A machine may be gone. Whether this is a restart, and one too many, is found where all meet.
                self._remaining_restarts = max(1, self._remaining_restarts)
        elif result.state == WorkerState.SUCCEEDED and self._has_made_room():
            self._meeting.leave_round()
            return RunResult(state=WorkerState.HEALTHY)  # with machines waiting: the agent begins a new round
        return result

    def _make_room(self, worker_group: WorkerGroup) -> None:
        """Machines want to join: lets the ranks save and stop, so that no step is lost when they are started again."""
        if self._regrouping_since is None:
            self._regrouping_since = time.monotonic()
        # One machine's ranks are enough, they decide together; a little later, so that all machines know what for.
        due = worker_group.group_rank == 0 and time.monotonic() - self._regrouping_since > _ALL_KNOW_S
        if due and not self.job.stop_file.exists():
            self.job.ask_to_stop("a machine joins")

    def _has_made_room(self) -> bool:
        """Whether all ranks have stopped for machines that join, and not because the run is done or somebody asked."""
        left = outcomes.read_all(self.job.folder)
        return self._regrouping_since is not None and not self.job.stopping and all(o.kind == "stopped" for o in left)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        cause = outcomes.first_cause(self._seen)
        outcomes.set_aside(self.job.folder, [worker.global_rank for worker in worker_group.workers], self._attempt)
        self._seen = []
        self._attempt += 1
        self._regrouping_since = None
        if not self.job.stopping:
            self.job.stop_file.unlink(missing_ok=True)
        limit = worker_group.spec.max_restarts
        if cause is not None and not (self.job.nnodes > 1 and cause.blames_a_peer):
            ending = f"; restarting all ranks from the last checkpoint ({limit - self._remaining_restarts} of {limit})"
            text = self._tell(cause, ending)
            self._meeting.cause = {"rank": cause.rank, "step": cause.step, "cause": text}
        super()._restart_workers(worker_group)

    def _shutdown(self, *arguments: Any, **options: Any) -> None:  # they differ between versions of torch
        super()._shutdown(signal.SIGKILL)  # SIGTERM asks a rank to save and stop: too late for that

    def _ranks(self) -> dict[int, subprocess.Popen[Any]]:
        """The processes of this machine's ranks, by global rank."""
        if not isinstance(self._pcontext, SubprocessContext):
            return {}
        handlers = self._pcontext.subprocess_handlers
        workers = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        return {workers[local_rank]: handler.proc for local_rank, handler in handlers.items()}

    def _kill_ranks(self) -> None:
        ranks = self._ranks().values()
        for process in ranks:
            if process.poll() is None:
                # Each rank leads a session of its own, and its loader workers are in it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + _DYING_S
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _deaths(self, ranks: Mapping[int, subprocess.Popen[Any]]) -> list[Outcome]:
        """What became of the ranks, once one has died; empty while none has."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while True:
            ended = {rank: status for rank, process in ranks.items() if (status := process.poll()) is not None}
            left = {outcome.rank: outcome for outcome in outcomes.read_all(self.job.folder)}
            # Status 0 without a word is a death too: the recipe, or a library, has ended the process.
            died = {rank: status for rank, status in ended.items() if status != 0 or rank not in left}
            if not died:
                return []
            beats = {beat.rank: beat for beat in beats_of(self.job.folder, died)}
            for rank, status in died.items():
                if rank not in left:  # when it was last seen alive comes before any echo of its death
                    left[rank] = _death(rank, status, beats[rank].time or time.time())
            cause = outcomes.first_cause(list(left.values()))
            if cause is None and any(process.poll() is None for process in ranks.values()):
                return []  # it had done its work and stumbled on its way out; the others are still at theirs
            if cause is None or not cause.blames_a_peer or len(ranks) == len(died) or time.monotonic() > deadline:
                steps = {rank: beat.step or None for rank, beat in beats.items()}
                return [replace(seen, step=seen.step or steps.get(rank)) for rank, seen in left.items()]
            time.sleep(0.02)

    def _new_lookout(self) -> Lookout:
        return Lookout(self.job.folder, self.job.limits, self.job.run_folder, say)

    def _find_hang(self, ranks: Mapping[int, subprocess.Popen[Any]]) -> Outcome | None:
        """The rank that has stood still for too long, as if it had died."""
        alive = {rank: process.pid for rank, process in ranks.items() if process.poll() is None}
        several = (self._worker_group.group_world_size or 1) > 1
        found = self._lookout.find(alive, attempt=self._attempt, other_machines=several)
        if found is None:
            return None
        self._note("hang", found.details)
        return found.outcome

    def _tell(self, cause: Outcome, ending: str) -> str:
        """Says what happened, and whether it was the same the last time; returns that without the ending."""
        who = cause.rank, cause.step, cause.message.partition(";")[0]
        again = " (the same as before)" if who == self._cause_before else ""
        self._cause_before = who
        if cause.traceback:
            with contextlib.suppress(OSError):
                print(cause.traceback.rstrip(), file=sys.stderr, flush=True)
        text = cause.describe() + again
        say(text + ending)
        return text

    def _note(self, kind: str, details: Mapping[str, Any]) -> None:
        note = self.job.note
        if note is not None:
            within(FILES_S, lambda: note(kind, details))


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """torch 2.9 puts signal handlers of its own in place of ours whenever ranks are started, whatever it is told."""
    kept = {signum: signal.getsignal(signum) for signum in (*stop_signals(), signal.SIGQUIT)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # python allows handlers only there
            for signum, handler in kept.items():
                if handler is not None:  # installed from C: cannot be put back from python
                    signal.signal(signum, handler)


def say(line: str) -> None:
    """One line of the launcher to the user."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"unisono: {line}", file=sys.stderr, flush=True)


def _death(rank: int, status: int, moment: float) -> Outcome:
    """The outcome of a rank that left none."""
    if status >= 0:
        return Outcome("crashed", f"ended with status {status} without saying why", rank, time=moment)
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = f"signal {-status}"
    hint = " (by hand, or by the system because memory ran out)" if -status == signal.SIGKILL else ""
    return Outcome("crashed", f"killed by {name}{hint}", rank, time=moment)
