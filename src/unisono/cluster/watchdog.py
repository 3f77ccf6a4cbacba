"""Hangs where no launcher of ours looks on: under torchrun, srun or mpirun, and in a single process.

A thread of each rank watches its own rank's pulse. When it has stood still for too long, the threads tell each other
through the ranks' store where their ranks are, agree on whom to blame (a rank that says nothing is the suspect), keep
their stacks, and end their processes; the launcher then starts them again or ends the job. One of them tells the user.

A C extension that never returns the interpreter's lock stops this thread too. Then the others find this rank silent,
and a timer of faulthandler's, which needs no lock, prints its stack. The timer does not end the process: it cannot
tell that from a job that was suspended (Ctrl-Z, SLURM's gang scheduling) and has just gone on.
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

from unisono.cluster.hang import Limits, Onlooker, Stand, culprit
from unisono.cluster.outcome import Outcome, write
from unisono.cluster.processes import another_store
from unisono.cluster.pulse import Beat, Pulse
from unisono.cluster.sbatch import OUTCOMES
from unisono.cluster.stacks import (
    FILES_S,
    is_debugged,
    keep_stacks,
    own_main_thread,
    own_stacks,
    waits_for_others,
    within,
)
from unisono.errors import EXIT_DIED, EXIT_FAILED

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from unisono.cluster.environment import World

_STORE_S = 10.0  # for the store to answer; rank 0 may be the one that hangs, and host it
_SILENCE_S = 60.0  # python's lock may well be held for some seconds, by a compiler say
_SILENT = "silent"  # the phase of a rank of which nothing is known


class Watchdog:
    """Watches this rank, for use in a `with` block around the session; `joined` tells it that there are others."""

    def __init__(self, pulse: Pulse, world: World, limits: Limits) -> None:
        self._pulse, self._world, self._limits = pulse, world, limits
        self.run_folder: Path | None = None  # where stacks are kept, once known
        self.note: Callable[[str, Mapping[str, Any]], None] | None = None  # told of a hang, as an event of the run
        self._closed, self._joined, self._ending = threading.Event(), threading.Event(), threading.Event()
        shortest = min((limit for limit in (limits.hang_s, limits.start_s) if limit), default=0.0)
        self._poll_s = min(max(shortest / 20, 0.1), 5.0)
        self._thread: threading.Thread | None = None
        self._onlooker = Onlooker()
        self._store: Store | None = None
        self._said = 0
        self._called_at: float | None = None
        self._before: dict[int, str] = {}
        self._told = -1

    def __enter__(self) -> Watchdog:
        if self._world.launcher != "unisono" and (self._limits.hang_s or self._limits.start_s):
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._ending.is_set():  # what the session says now is the echo of peers that have ended
            time.sleep(60)
        self._closed.set()
        if self._thread is not None:
            self._thread.join(1.0)  # it would set the timer again
            faulthandler.cancel_dump_traceback_later()

    def joined(self) -> None:
        """The ranks have found each other: from now on there is a store to talk through."""
        self._joined.set()

    def _watch(self) -> None:
        while not self._closed.wait(self._poll_s):
            [stand] = self._onlooker.look([self._pulse.last])
            self._set_timer(stand)
            over = stand.is_over(self._limits)
            if over and is_debugged(own_main_thread()):
                continue
            if self._world.size == 1 or not self._joined.is_set():
                if over:
                    self._end(stand, own_main_thread())
                continue
            try:
                self._exchange(stand, over)
            except (RuntimeError, OSError) as error:  # torch's DistError and DistNetworkError are RuntimeErrors
                self._store = None
                if over and not self._closed.is_set():
                    print(f"unisono: the ranks' store does not answer ({type(error).__name__})", file=sys.stderr)
                    self._end(Stand(Beat(0, _SILENT, 0, 0, 0.0), stand.seconds), [], silent=[0])

    def _set_timer(self, stand: Stand) -> None:
        limit = self._limits.of(stand.beat)
        if limit is None or sys.__stderr__ is None or self._closed.is_set():
            faulthandler.cancel_dump_traceback_later()
        else:
            with contextlib.suppress(ValueError, OSError):  # stderr may be closed
                faulthandler.dump_traceback_later(limit + 4 * self._poll_s + 3.0, file=sys.__stderr__)

    def _exchange(self, stand: Stand, over: bool) -> None:
        """Tells the others where this rank is once one has called, and decides when this one has waited long enough."""
        if self._store is None:
            self._store = another_store(self._world, "watchdog", _STORE_S)
        store = self._store
        if not over and not store.check(["call"]):
            self._called_at = None
            return  # the usual case: one short question now and then
        if store.check(["verdict"]):
            self._obey(json.loads(store.get("verdict")))
        if over and self._called_at is None:
            store.set("call", "")
            self._called_at, self._before = time.monotonic(), self._answers(store)
        elif not over:
            self._called_at = None
        self._publish(store, stand)
        if self._called_at is not None and time.monotonic() - self._called_at > 4 * self._poll_s + 2.0:
            self._conclude(store, stand, time.monotonic() - self._called_at)

    def _publish(self, store: Store, stand: Stand) -> None:
        self._said += 1
        calls = own_main_thread()
        said = {"beat": asdict(stand.beat), "seconds": stand.seconds, "waits": waits_for_others(calls), "calls": calls}
        store.set(f"rank{self._world.rank}", json.dumps({**said, "said": self._said}))

    def _answers(self, store: Store) -> dict[int, str]:
        others = [rank for rank in range(self._world.size) if store.check([f"rank{rank}"])]
        return {rank: store.get(f"rank{rank}").decode() for rank in others}

    def _conclude(self, store: Store, own: Stand, waited_s: float) -> None:
        answers = self._answers(store)
        stands, calls = [], {}
        for rank, text in answers.items():
            said = json.loads(text)
            stands.append(Stand(Beat(**said["beat"]), said["seconds"], said["waits"]))
            calls[rank] = said["calls"]
        # A thread that runs says something new at every look; what does not change is of a process that stands still.
        silent = [rank for rank in range(self._world.size) if answers.get(rank) == self._before.get(rank)]
        if silent and waited_s < min(self._limits.of(own.beat) or 0.0, _SILENCE_S):
            return
        if silent:
            known = {stand.rank: stand.beat for stand in stands}
            last = known.get(silent[0], Beat(silent[0], _SILENT, 0, 0, 0.0))
            blamed, stack = Stand(last, own.seconds), []
        else:
            found = culprit(stands)
            assert found is not None
            if not found.is_over(self._limits):  # it still makes progress, or may take its time
                self._called_at = None
                return
            blamed, stack = found, calls[found.rank]
        by = self._world.rank  # no two ranks write the same: only the one whose words stand there tells the user
        verdict = json.dumps({"by": by, "beat": asdict(blamed.beat), "silent": silent})
        if store.compare_set("verdict", "", verdict).decode() == verdict:
            self._end(blamed, stack, silent=silent)
        self._obey(json.loads(store.get("verdict")))

    def _obey(self, verdict: Mapping[str, Any]) -> None:
        """Another rank has decided and tells the user."""
        self._ending.set()
        self._keep(Beat(**verdict["beat"]).step)
        self._leave(verdict["silent"])

    def _end(self, blamed: Stand, calls: list[str], *, silent: Collection[int] = ()) -> None:
        """Tells the user whom to blame and ends this process; where a person sits at it, it only tells."""
        beat = blamed.beat
        if self._told == beat.number:
            return
        self._told = beat.number
        only_tells = self._world.launcher == "plain" and hasattr(sys, "ps1")
        if not only_tells:
            self._ending.set()
        if silent:
            why = "stopped, killed, cut off, or in a call that holds python's lock"
            what = f"says nothing for {blamed.seconds:.0f} s ({why})"
        else:
            what = f"{blamed.describe()} ({self._limits.name_of(beat)} {self._limits.of(beat):g})"
        message = what + self._keep(beat.step)
        note = self.note
        if note is not None:
            details = {"step": beat.step, "rank": beat.rank, "phase": beat.phase, "seconds": round(blamed.seconds)}
            within(FILES_S, lambda: note("hang", details))
        stack = "\n".join([f"stack of rank {beat.rank}, innermost call first:", *calls, ""]) if calls else ""
        outcomes = os.environ.get(OUTCOMES)
        with contextlib.suppress(OSError, ValueError):
            if outcomes and Path(outcomes).is_dir():  # the batch script tells it, and starts all ranks again
                write(Path(outcomes), Outcome("crashed", message, beat.rank, beat.step or None, stack))
            else:
                print(f"{stack}unisono: {blamed.where()}: {message}", file=sys.stderr, flush=True)
        if not only_tells:
            self._leave(silent)

    def _keep(self, step: int) -> str:
        """Keeps this rank's stacks; where, for a message."""
        if self.run_folder is None:
            return ""
        name = f"step_{step:08d}-attempt{self._world.restart_count}"
        return "; " + keep_stacks(self.run_folder, name, {self._world.rank: own_stacks()})

    def _leave(self, silent: Collection[int]) -> None:
        """Ends the process, when all ranks that can know why: the first to go takes the connections of the others."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError, OSError):
                self._store.set(f"knows{self._world.rank}", "")
                others = [f"knows{rank}" for rank in range(self._world.size) if rank not in silent]
                deadline = time.monotonic() + 2 * self._poll_s + 3.0
                while not self._store.check(others) and time.monotonic() < deadline:
                    time.sleep(0.05)
                if self._world.rank == 0:
                    time.sleep(0.2)  # it may host the store
        os._exit(EXIT_FAILED if self._world.launcher == "plain" else EXIT_DIED)
