"""Follows a submitted SLURM job on the terminal: prints its state in the queue and the run's events and metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.cluster.slurm.commands import JobState, job_state
from unisono.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USER_ERROR
from unisono.observe.folder import EVENTS, METRICS
from unisono.observe.json_lines import parse_record
from unisono.plain_files import open_regular

_POLL_S = 2.0
_PROGRESS_S = 10.0
_HIDDEN_EVENTS = ("save",)  # too frequent
_HIDDEN_DETAILS = ("kind", "time", "rank")


def follow(job: int, run: Path, total_steps: int | None) -> int:
    """Prints every change until the job ends; returns the job's exit code. Ctrl-C does not affect the job."""
    run_log = _RunLog(run, total_steps)
    previous = ""
    try:
        while True:
            state = job_state(job)
            description = "ended; SLURM no longer has its exit code" if state is None else state.describe()
            is_over = state is None or state.is_over
            run_log.print_new(final=is_over)
            if description != previous:
                print(f"job {job}: {description}", flush=True)
                previous = description
            if is_over:
                return _exit_code(state, run_log.last_event)
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        print(f"no longer following; job {job} continues. To stop it: scancel {job}", flush=True)
        return EXIT_DONE


def _exit_code(state: JobState | None, last_event: str) -> int:
    if state is None:
        return {"done": EXIT_DONE, "stopped": EXIT_STOPPED}.get(last_event, EXIT_FAILED)
    if state.name == "COMPLETED":
        return EXIT_DONE
    return state.exit_code if state.exit_code in (EXIT_USER_ERROR, EXIT_STOPPED) else EXIT_FAILED


class _RunLog:
    """Prints events and metrics as the job appends them to the run's files."""

    def __init__(self, run: Path, total_steps: int | None) -> None:
        self._total_steps = total_steps
        self._metrics, self._events = _Tail(run / METRICS), _Tail(run / EVENTS)
        self._printed_at = float("-inf")
        self._newest: dict[str, Any] | None = None  # metrics of the newest step that is not printed yet
        self.last_event = ""

    def print_new(self, *, final: bool) -> None:
        """Prints new events, and the newest step if it is due or the job has ended."""
        for event in self._events.new_records():
            self.last_event = str(event.get("kind", ""))
            if self.last_event not in _HIDDEN_EVENTS:
                details = [
                    f"{name} {value}"
                    for name, value in event.items()
                    if name not in _HIDDEN_DETAILS and value is not None
                ]
                print(f"  {self.last_event}: {', '.join(details)}", flush=True)
        for record in self._metrics.new_records():
            if "loss" in record:
                self._newest = record
        if self._newest is not None and (final or time.monotonic() - self._printed_at >= _PROGRESS_S):
            print(f"  {_describe_step(self._newest, self._total_steps)}", flush=True)
            self._newest, self._printed_at = None, time.monotonic()


class _Tail:
    """Reads the records that are appended to a file from now on. A restart of the run may shorten the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def new_records(self) -> Iterator[dict[str, Any]]:
        try:
            with open_regular(self._path) as file:
                self._position = min(self._position, file.seek(0, 2))
                file.seek(self._position)
                data = file.readall()
        except OSError:
            return
        complete = data[: data.rfind(b"\n") + 1]  # the job may still be writing the last line
        self._position += len(complete)
        for line in complete.splitlines():
            if (record := parse_record(line)) is not None:
                yield record


def _describe_step(record: dict[str, Any], total_steps: int | None) -> str:
    loss, speed = record["loss"], record.get("samples_per_s")
    parts = [
        f"step {record.get('step')}{f' of {total_steps}' if total_steps else ''}",
        f"loss {loss:.4g}" if isinstance(loss, float) else f"loss {loss}",
    ]
    if isinstance(speed, int | float):
        parts.append(f"{speed:.3g} samples/s")
    return ", ".join(parts)
