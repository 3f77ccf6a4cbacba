"""Forks ranks from processes that have already imported torch, so that short runs start at once.

Starting Python and importing torch takes seconds, while a short run takes a fraction of a second. A program that makes
many short runs, such as `unisono verify`, starts as many warm processes as its largest run has ranks. Rank i of every
run is a fork of warm process i. Each rank is still its own process: nothing that one run changes (torch's global flags,
random state, the working directory) affects the next, and neither does a rank that crashes or hangs. There are several
warm processes, because the ranks of a real run differ in what Python draws at random at startup, such as the iteration
order of a set of strings.

The warm program reads requests from its standard input and writes process ids and exit statuses to its standard output,
one line of JSON each (`unisono.engine.start.warm_rank` is such a program).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.cluster import outcome as outcomes
from unisono.cluster.hangs.diagnosis import Limits
from unisono.cluster.hangs.launcher_monitor import HangMonitor
from unisono.cluster.launch.job_folder import collect_outcomes
from unisono.cluster.lifetime import LAUNCHER_PID
from unisono.cluster.outcome import Outcome

_POLL_S = 0.05
_CAUSE_WAIT_S = 1.0  # seconds to wait after a rank's death, so that a rank that caused it can write its outcome
_KILL_WAIT_S = 10.0  # seconds for killed processes to exit; a process blocked in the kernel may never do so


class WarmRanks:
    """The warm processes of this program, for use in a `with` block; `run` forks the ranks of one run from them."""

    def __init__(self, command: Sequence[str], num_ranks: int) -> None:
        """Starts the processes, which import torch in the background."""
        environ = {**os.environ, LAUNCHER_PID: str(os.getpid())}
        self._processes = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, bufsize=0, start_new_session=True
            )
            for _ in range(num_ranks)
        ]
        self._pids: dict[int, int] = {}  # process ids of the running ranks, by rank

    def __enter__(self) -> WarmRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill_ranks()
        for process in self._processes:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_WAIT_S)
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()

    def run(
        self,
        environs: Sequence[Mapping[str, str]],
        job_folder: Path,
        limits: Limits,
        *,
        first: int = 0,
        on_poll: Callable[[], None] = lambda: None,
    ) -> list[Outcome]:
        """Executes one run with a rank for each of `environs` and returns the outcomes of the ranks.

        Ranks write their outcome to `job_folder`, as under `launcher.py`. If one dies, or makes no progress for longer
        than `limits`, the others are killed. Rank i is a fork of warm process `first` + i. While the run lasts,
        `on_poll` is called about every 0.05 s.
        """
        warm = {rank: self._processes[(first + rank) % len(self._processes)] for rank in range(len(environs))}
        monitor = HangMonitor(job_folder, limits, None, lambda text: None)
        statuses: dict[int, int] = {}
        died_at: float | None = None
        final: list[Outcome] | None = None  # the outcomes at the moment when the remaining ranks were killed
        with selectors.DefaultSelector() as answers:
            for rank, process in warm.items():
                self._request(process, {"environ": dict(environs[rank])})
                assert process.stdout is not None
                answers.register(process.stdout, selectors.EVENT_READ, rank)
            while len(statuses) < len(warm):
                for key, _ in answers.select(_POLL_S):
                    for answer in self._answers(warm[key.data]):
                        if "pid" in answer:
                            self._pids[key.data] = answer["pid"]
                        else:
                            statuses[key.data] = answer["status"]
                            self._pids.pop(key.data)
                            answers.unregister(key.fileobj)
                on_poll()
                if final is not None or len(self._pids) + len(statuses) < len(warm):
                    continue
                so_far = collect_outcomes(job_folder, statuses)
                cause = outcomes.first_cause(so_far)
                if cause is not None:
                    died_at = died_at or time.monotonic()
                    if not cause.blames_a_peer or time.monotonic() - died_at > _CAUSE_WAIT_S:
                        final = so_far
                elif (hang := monitor.check(self._pids, attempt=0, other_machines=False)) is not None:
                    final = [hang.outcome()]
                if final is not None:
                    self._kill_ranks()
        return final or collect_outcomes(job_folder, statuses)

    def _request(self, process: subprocess.Popen[bytes], request: Mapping[str, Any]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the warm process has died; `_answers` will raise
            process.stdin.write(json.dumps(request).encode() + b"\n")

    def _answers(self, process: subprocess.Popen[bytes]) -> list[dict[str, int]]:
        """Returns the answers that have arrived; lines are short enough to arrive whole."""
        assert process.stdout is not None
        text = os.read(process.stdout.fileno(), 65536)
        if not text:
            raise RuntimeError(f"a process that forks ranks exited with status {process.wait()}")
        return [json.loads(line) for line in text.splitlines()]

    def _kill_ranks(self) -> None:
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # each rank leads its own session, which includes its loader workers
