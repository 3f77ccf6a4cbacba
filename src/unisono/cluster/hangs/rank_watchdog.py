"""Detects hangs from inside a rank: under torchrun, srun or mpirun, and in a single process.

A thread of each rank watches that rank's heartbeat. When the rank exceeds its limit, the watchdogs of all ranks publish
their status in the ranks' TCPStore, and the first to reach a verdict writes it there. A rank that publishes nothing is
the suspect. The rank that wrote the verdict reports the hang, every rank saves its own stacks, and all processes exit.
The launcher then restarts them or ends the job.

A C extension that never releases the GIL stops this thread too. The other ranks then get no response from this rank,
and a faulthandler timer, which needs no GIL, prints its stack. The timer does not end the process, because it cannot
distinguish this case from a job that was suspended (Ctrl-Z, SLURM's gang scheduling) and has just resumed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cluster.hangs.diagnosis import Limits, ProgressTracker, RankStatus, hung_rank
from unisono.cluster.hangs.heartbeat import Beat, Heartbeat
from unisono.cluster.hangs.report import Hang
from unisono.cluster.hangs.stacks import (
    FILES_S,
    finishes_within,
    is_debugged,
    is_in_collective,
    own_main_thread,
    own_stacks,
    save_stacks,
)
from unisono.cluster.outcome import write
from unisono.cluster.process_group import open_store
from unisono.cluster.slurm.script import OUTCOMES
from unisono.errors import EXIT_DIED, EXIT_FAILED
from unisono.typed_paths import as_typed

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from unisono.cluster.environment import World

_STORE_S = 10.0  # seconds to wait for the store; the hanging rank may be rank 0, which hosts it
_SILENCE_S = 60.0  # seconds to wait for a rank's status; its watchdog cannot run while, say, a compiler holds the GIL
_SILENT = "silent"  # the phase of a rank that has published nothing


class Watchdog:
    """Watches this rank, for use in a `with` block around the session; inactive under unisono's own launcher."""

    def __init__(self, heartbeat: Heartbeat, world: World, limits: Limits) -> None:
        self._heartbeat, self._world, self._limits = heartbeat, world, limits
        self.run_folder: Path | None = None  # folder in which stacks are saved; set once the run folder is known
        self.record_event: Callable[[str, Mapping[str, Any]], None] | None = None  # receives the `hang` event
        self._closed, self._joined, self._ending = threading.Event(), threading.Event(), threading.Event()
        shortest = min((limit for limit in (limits.hang_s, limits.start_s) if limit), default=0.0)
        self._poll_s = min(max(shortest / 20, 0.1), 5.0)
        self._thread: threading.Thread | None = None
        self._tracker = ProgressTracker()
        self._store: Store | None = None
        self._num_published = 0
        self._called_at: float | None = None  # when this rank asked the others for their status
        self._statuses_at_call: dict[int, str] = {}
        self._last_reported = -1  # number of the beat of the last reported hang

    def __enter__(self) -> Watchdog:
        if self._world.launcher != "unisono" and (self._limits.hang_s or self._limits.start_s):
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._ending.is_set():  # this error is a consequence of the hang; the watchdog ends the process
            time.sleep(60)
        self._closed.set()
        if self._thread is not None:
            self._thread.join(1.0)  # stop the thread before cancelling the timer, because the thread restarts it
            faulthandler.cancel_dump_traceback_later()

    def joined(self) -> None:
        """Enables the exchange with other ranks; call it when the process group and its store exist."""
        self._joined.set()

    def _watch(self) -> None:
        while not self._closed.wait(self._poll_s):
            [status] = self._tracker.update([self._heartbeat.last], self._poll_s)
            self._set_timer(status)
            exceeded = status.exceeds(self._limits)
            if exceeded and is_debugged(own_main_thread()):
                continue
            if self._world.size == 1 or not self._joined.is_set():
                if exceeded:
                    self._report_and_exit(status, own_main_thread())
                continue
            try:
                self._exchange(status, exceeded)
            except (RuntimeError, OSError) as error:  # torch's DistError and DistNetworkError are RuntimeErrors
                self._store = None
                if exceeded and not self._closed.is_set():
                    print(f"unisono: the ranks' store does not respond ({type(error).__name__})", file=sys.stderr)
                    self._report_and_exit(RankStatus(Beat(0, _SILENT, 0, 0, 0.0), status.idle_s), [], silent=[0])
            finally:
                self._tracker.clock.advance(_STORE_S)  # waiting for the store must not count as a pause of this process

    def _set_timer(self, status: RankStatus) -> None:
        limit = self._limits.limit_for(status.beat)
        if limit is None or sys.__stderr__ is None or self._closed.is_set():
            faulthandler.cancel_dump_traceback_later()
        else:
            with contextlib.suppress(ValueError, OSError):  # stderr may be closed
                faulthandler.dump_traceback_later(limit + 4 * self._poll_s + 3.0, file=sys.__stderr__)

    def _exchange(self, status: RankStatus, exceeded: bool) -> None:
        """Publishes this rank's status once any rank has asked for it; decides after all ranks had time to publish."""
        if self._store is None:
            self._store = open_store(self._world, "watchdog", _STORE_S)
        store = self._store
        if not exceeded and not store.check(["call"]):
            self._called_at = None
            return  # usually nobody has called, so each poll makes only one short query
        if store.check(["verdict"]):
            self._follow(json.loads(store.get("verdict")))
        if exceeded and self._called_at is None:
            store.set("call", "")
            self._called_at, self._statuses_at_call = self._tracker.clock.now, self._published(store)
        elif not exceeded:
            self._called_at = None
        self._publish(store, status)
        if self._called_at is not None and self._tracker.clock.now - self._called_at > 4 * self._poll_s + 2.0:
            self._conclude(store, status, self._tracker.clock.now - self._called_at)

    def _publish(self, store: Store, status: RankStatus) -> None:
        self._num_published += 1
        calls = own_main_thread()
        message = {
            "beat": asdict(status.beat),
            "idle_s": status.idle_s,
            "in_collective": is_in_collective(calls),
            "calls": calls,
            "count": self._num_published,
        }
        store.set(f"rank{self._world.rank}", json.dumps(message))

    def _published(self, store: Store) -> dict[int, str]:
        """Returns the last message of each rank that has published one."""
        ranks = [rank for rank in range(self._world.size) if store.check([f"rank{rank}"])]
        return {rank: store.get(f"rank{rank}").decode() for rank in ranks}

    def _conclude(self, store: Store, own: RankStatus, waited_s: float) -> None:
        """Writes a verdict that names the hanging rank; returns without one if it is too early to decide."""
        published = self._published(store)
        statuses, calls = {}, {}
        for rank, text in published.items():
            message = json.loads(text)
            statuses[rank] = RankStatus(Beat(**message["beat"]), message["idle_s"], message["in_collective"])
            calls[rank] = message["calls"]
        # A running watchdog publishes a new count at every poll. A message that does not change comes from a process
        # that is stopped.
        silent = [rank for rank in range(self._world.size) if published.get(rank) == self._statuses_at_call.get(rank)]
        if silent and waited_s < min(self._limits.limit_for(own.beat) or 0.0, _SILENCE_S):
            return
        if silent:
            last = statuses[silent[0]].beat if silent[0] in statuses else Beat(silent[0], _SILENT, 0, 0, 0.0)
            blamed, stack = RankStatus(last, own.idle_s), []
        else:
            hung = hung_rank(list(statuses.values()), self._limits)
            if hung is None:  # the rank furthest behind makes progress, or is in a phase without a limit
                self._called_at = None
                return
            blamed, stack = hung, calls[hung.rank]
        # "by" makes each rank's verdict unique, so that exactly one rank sees its own in the store and reports it.
        verdict = json.dumps({"by": self._world.rank, "beat": asdict(blamed.beat), "silent": silent})
        if store.compare_set("verdict", "", verdict).decode() == verdict:
            self._report_and_exit(blamed, stack, silent=silent)
        self._follow(json.loads(store.get("verdict")))

    def _follow(self, verdict: Mapping[str, Any]) -> None:
        """Exits because of another rank's verdict; that rank reports the hang."""
        self._ending.set()
        self._save_own_stacks(Beat(**verdict["beat"]).step)
        self._exit(verdict["silent"])

    def _report_and_exit(self, blamed: RankStatus, calls: list[str], *, silent: Collection[int] = ()) -> None:
        """Reports the hang and ends this process; in an interactive session it only reports."""
        beat = blamed.beat
        if self._last_reported == beat.number:
            return
        self._last_reported = beat.number
        interactive = self._world.launcher == "plain" and hasattr(sys, "ps1")
        if not interactive:
            self._ending.set()
        hang = Hang(blamed, self._limits, calls, bool(silent), self._save_own_stacks(beat.step))
        record_event = self.record_event
        if record_event is not None:
            finishes_within(FILES_S, lambda: record_event("hang", hang.event()))
        outcome, folder = hang.outcome(), os.environ.get(OUTCOMES)
        with contextlib.suppress(OSError, ValueError):
            if folder and Path(folder).is_dir():  # the batch script prints the outcome and restarts all ranks
                write(Path(folder), outcome)
            else:
                stack = f"{outcome.traceback}\n" if outcome.traceback else ""
                print(as_typed(f"{stack}unisono: {outcome.describe()}"), file=sys.stderr, flush=True)
        if not interactive:
            self._exit(silent)

    def _save_own_stacks(self, step: int) -> str:
        stacks = {self._world.rank: own_stacks()} if self.run_folder is not None else {}
        return save_stacks(self.run_folder, step, self._world.restart_count, stacks)

    def _exit(self, silent: Collection[int]) -> None:
        """Ends the process once all responsive ranks have read the verdict. The first exit breaks their connections."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError, OSError):
                self._store.set(f"knows{self._world.rank}", "")
                others = [f"knows{rank}" for rank in range(self._world.size) if rank not in silent]
                deadline = time.monotonic() + 2 * self._poll_s + 3.0
                while not self._store.check(others) and time.monotonic() < deadline:
                    time.sleep(0.05)
                if self._world.rank == 0:
                    time.sleep(0.2)  # rank 0 may host the store that the others still poll
        os._exit(EXIT_FAILED if self._world.launcher == "plain" else EXIT_DIED)
