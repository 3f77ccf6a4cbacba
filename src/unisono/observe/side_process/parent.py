"""Starts and ends processes that follow the run folder, from the process of the main rank.

Training never waits for them: they read the run folder by themselves, so a step costs nothing. Only at the end does a
run wait for them, for a limited time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from unisono.observe.folder import append_event

_SOON_S = 3.0
_VARIABLES_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class SideProcesses:
    """The side processes of a run. The lines that they print for the user also become events of one kind."""

    def __init__(self, folder: Path, message: Callable[[str], None], *, event: str, timeout_s: float) -> None:
        """`message` prints a line for the user; it is called from other threads."""
        self._folder, self._message, self._event, self._timeout_s = folder, message, event, timeout_s
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []

    def start(self, label: str, module: str, order: Mapping[str, object]) -> None:
        """Starts `python -m MODULE` and sends it `order`, the description of its task. `label` begins its lines."""
        # Hide the GPUs and the variables of a rank, which libraries would otherwise use.
        environ = {name: value for name, value in os.environ.items() if name not in _VARIABLES_OF_RANKS}
        environ |= {"CUDA_VISIBLE_DEVICES": "", "UNISONO_LAUNCHER_PID": str(os.getpid()), "OMP_NUM_THREADS": "1"}
        try:
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environ,
                start_new_session=True,  # Ctrl-C in the terminal must not reach the process
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps({**order, "hang_s": self._timeout_s}) + "\n")
            process.stdin.flush()
        except OSError as error:
            self._warn(f"{label}: its process cannot start ({error.strerror}); the run continues without it")
            return
        self._processes[label] = process
        reader = threading.Thread(target=self._read, args=[process], daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with suppress(ValueError, OSError):  # closed at the end of the run
            for line in process.stdout:
                self._warn(line.strip())

    def _warn(self, line: str) -> None:
        self._message(line)
        append_event(self._folder, self._event, rank=0, text=line)

    def close(self, *, ended: bool) -> None:
        """Lets the processes finish their work, and ends them. `ended`: the run is over and not merely interrupted."""
        if not self._processes:
            return
        deadline = time.monotonic() + (self._timeout_s if ended else min(self._timeout_s, _SOON_S))
        for process in self._processes.values():
            assert process.stdin is not None
            with suppress(OSError):  # the process is gone
                # Closing the pipe is not enough, because a process that the recipe forked may hold it open.
                process.stdin.write("end\n")
                process.stdin.close()
        names = " and ".join(label.removeprefix("track ") for label in self._processes)
        announced = threading.Timer(_SOON_S, self._message, [f"waiting for {names}"])
        announced.daemon = True
        announced.start()
        try:
            for label, process in self._processes.items():
                self._wait(label, process, deadline)
        finally:
            announced.cancel()
        for reader in self._readers:
            reader.join(timeout=1.0)
        self._processes.clear()

    def _wait(self, label: str, process: subprocess.Popen[str], deadline: float) -> None:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self._message(f"{label}: did not finish in time; the run folder contains what is missing")
