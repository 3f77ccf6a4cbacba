"""The Ray actor that represents one machine of a run; it runs unisono's launcher in a separate process.

The launcher has its own process because it handles signals and because torch's elastic agent must run in a main thread.
The launcher and its ranks die with the actor, whether Ray kills the actor, the node is lost or the driver ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import IO, Any, TypedDict

from unisono.cluster.lifetime import LAUNCHER_PID
from unisono.cluster.rendezvous.authentication import SECRET_FILE
from unisono.errors import EXIT_USER_ERROR

_POLL_S = 0.5
# Seconds to wait for the end of the output after the launcher has ended: a process of the recipe may hold the pipe.
_END_OF_OUTPUT_S = 5.0
_MOST_LINES = 20_000  # maximum number of lines to buffer; older lines are dropped


class Report(TypedDict):
    """What happened on a machine since the previous report."""

    node: str
    """Address of the node."""
    node_id: str
    lines: list[tuple[str, str]]
    """Lines of output, each with its stream, out or err."""
    exit: int | None
    """Exit status of the launcher; None while it runs."""
    result: dict[str, Any] | None
    """Result of the run, if the launcher wrote one."""


class Machine:
    """Starts the launcher on this node. Ray creates it as an actor."""

    def __init__(self, job: Mapping[str, Any], folder: str, environ: Mapping[str, str]) -> None:
        """Starts the launcher in the folder `folder`, and passes `job` to it (see `machine_program.py`)."""
        self._lines: deque[tuple[str, str]] = deque(maxlen=_MOST_LINES)
        self._changed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._readers: list[threading.Thread] = []
        self._result_text: str | None = None
        if not os.path.isdir(folder):
            self._refuse(
                f"the folder {folder}, in which the command was started, does not exist on this node; start "
                "the command in a folder on a file system that all nodes share"
            )
            return
        # Drop the node's own secret file: the driver passes the run's secret, and two sources would raise an error.
        inherited = {name: value for name, value in os.environ.items() if name != SECRET_FILE}
        self._result, write_end = os.pipe()
        self._process = subprocess.Popen(
            # -P: files in the current folder cannot shadow modules
            [sys.executable, "-P", "-m", "unisono.ray.machine_program"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[write_end],
            cwd=folder,
            env={**inherited, **environ, LAUNCHER_PID: str(os.getpid())},
            start_new_session=True,
        )
        os.close(write_end)
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(json.dumps({**job, "result_to": write_end}).encode())
        for stream, pipe in (("out", self._process.stdout), ("err", self._process.stderr)):
            assert pipe is not None
            reader = threading.Thread(target=self._read, args=(stream, pipe), daemon=True)
            reader.start()
            self._readers.append(reader)

    def poll(self) -> Report:
        """Reports new output and whether the launcher has ended; waits up to half a second for either."""
        import ray

        self._changed.wait(_POLL_S)
        self._changed.clear()
        status, result = (EXIT_USER_ERROR, None) if self._process is None else (self._process.poll(), None)
        if self._process is not None and status is not None:
            for reader in self._readers:
                reader.join(_END_OF_OUTPUT_S)
            if self._result_text is None:  # the driver asks again if a report is lost on its way
                with os.fdopen(self._result) as pipe:
                    self._result_text = pipe.read()
            result = json.loads(self._result_text) if self._result_text else None
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        return {
            "node": ray.util.get_node_ip_address(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "lines": lines,
            "exit": status,
            "result": result,
        }

    def signal(self, signum: int) -> None:
        """Sends a signal to the launcher, which asks the ranks to save and stop; a second signal kills them."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signum)

    def _refuse(self, reason: str) -> None:
        self._lines.append(("err", f"unisono: {reason}"))
        self._changed.set()

    def _read(self, stream: str, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self._lines.append((stream, line.decode(errors="replace").rstrip("\n")))
                self._changed.set()
        self._changed.set()
