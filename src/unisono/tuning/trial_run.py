"""Runs one trial as a process of `unisono train` in its own folder, and reads the evaluations that it writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.atomic_files import write_atomically
from unisono.cluster.lifetime import die_with_parent
from unisono.errors import EXIT_STOPPED, UserError
from unisono.observe.folder import EVENTS, METRICS, RUN, append_event
from unisono.observe.json_lines import JsonLines
from unisono.plain_files import read_json

TRIALS = "trials"
MAX_RESTARTS = 3
"""Maximum number of times that a trial is restarted after a signal has ended its process."""


class NoObjective(UserError):
    """Raised if an evaluation of a trial does not contain the objective."""


def folder_of(study: Path, number: int) -> Path:
    """Returns the run folder of a trial."""
    return study / TRIALS / f"{number:04d}"


def log_of(study: Path, number: int) -> Path:
    """Returns the file with everything that a trial printed."""
    return study / TRIALS / f"{number:04d}.log"


class TrialRun:
    """The process of one trial."""

    def __init__(
        self,
        study: Path,
        number: int,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        objective: str,
        last_step: int,
    ) -> None:
        """`arguments` are passed to `unisono train`; `last_step` is the last step whose evaluation is known."""
        self.number, self.folder, self.log = number, folder_of(study, number), log_of(study, number)
        self.is_pruned = self.is_stopping = False
        self._arguments, self._environ, self._objective = list(arguments), dict(environ), objective
        self._last_step, self._restarts = last_step, 0
        self._size = -1
        self.value: float | None = None
        """The objective of the last evaluation."""
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        parent = os.getpid()

        def end_with_study() -> None:
            die_with_parent()  # makes the kernel kill the trial if the study is killed
            if os.getppid() != parent:
                os._exit(128 + signal.SIGKILL)

        # -P: files in the current folder cannot shadow modules. A separate session: Ctrl-C reaches only the study,
        # which then asks its trials to stop.
        command = [sys.executable, "-P", "-m", "unisono", "train", *self._arguments, f"--output_dir={self.folder}"]
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environ},
                start_new_session=True,
                preexec_fn=end_with_study,  # the study has no threads, so this is safe
            )

    def poll(self) -> int | None:
        """Returns the exit code of the trial, or None while it runs; restarts the trial if a signal ended it."""
        code = self._process.poll()
        was_killed = code is not None and (code < 0 or code in (128 + signal.SIGKILL, EXIT_STOPPED))
        if was_killed and not self.is_stopping and self._restarts < MAX_RESTARTS:
            self._restarts += 1
            self._process = self._start()
            if self.is_stopping:  # stop() was called meanwhile, and its signal reached only the old process
                self._process.terminate()
            return None
        return code

    def new_evaluations(self) -> Iterator[tuple[int, float, bool]]:
        """Yields step, objective and whether the step is the run's last, for each evaluation since the last call."""
        file = self.folder / METRICS
        with suppress(OSError):
            size = file.stat().st_size
            if size == self._size:
                return
            self._size = size
        for record in JsonLines(file):
            step = record.get("step")
            names = [name for name in record if name.startswith("eval/")]
            if not names or not isinstance(step, int) or step < 1 or step <= self._last_step:
                continue
            value = number_of(record.get(self._objective))
            if value is None:
                raise NoObjective(
                    f"objective {self._objective} is not a metric of the evaluation, which has "
                    f"{', '.join(sorted(names)[:20])}"
                )
            self._last_step, self.value = step, value
            yield step, value, step >= num_steps(self.folder)

    def stop(self) -> None:
        """Asks the run to save a checkpoint and stop."""
        if not self.is_stopping:
            self.is_stopping = True
            self._process.terminate()

    def kill(self) -> None:
        """Kills the run and waits until it has ended."""
        self.is_stopping = True
        self._process.kill()
        self._process.wait()

    def last_words(self) -> str:
        """Returns the last line that the trial printed, which names the error if it failed."""
        with open(self.log, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("unisono: ") if lines else "it printed nothing"


def num_steps(folder: Path) -> int:
    """Returns the number of steps of a run, from events.jsonl; 0 if the run has not started."""
    steps = [event.get("steps") for event in JsonLines(folder / EVENTS)]
    return max((each for each in steps if isinstance(each, int)), default=0)


def number_of(value: object) -> float | None:
    """Returns a value of metrics.jsonl as a number (nan and inf are strings there); None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def final_value(folder: Path, objective: str) -> float | None:
    """Returns the objective of a run's last evaluation."""
    values = [number_of(record[objective]) for record in JsonLines(folder / METRICS) if objective in record]
    return values[-1] if values else None


def mark_trial(folder: Path, outcome: str, **details: Any) -> None:
    """Records the outcome of a trial in its run folder: in run.json and, if the trial was pruned, in events.jsonl.

    A repeated call changes nothing.
    """
    file = folder / RUN
    try:
        record = read_json(file)
    except (OSError, ValueError):  # the run failed so early that it has no folder
        return
    trial = {"outcome": outcome, **details}
    if record.get("trial") == trial:
        return
    if outcome == "pruned" and not any(event.get("kind") == "pruned" for event in JsonLines(folder / EVENTS)):
        append_event(folder, "pruned", **details)
    write_atomically(file, json.dumps({**record, "trial": trial}, indent=2), durable=True, one_writer=True)
