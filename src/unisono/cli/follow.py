"""What a submitted job is doing, on the terminal: its state in the queue, and the run's metrics and events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.cluster.slurm.commands import JobState, job_state
from unisono.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USER_ERROR
from unisono.observe.folder import EVENTS, METRICS
from unisono.plain_files import open_regular, parse_json

_POLL_S = 2.0
_PROGRESS_S = 10.0
_UNTOLD = ("save",)  # too many, and the progress says enough
_UNTOLD_DETAILS = ("kind", "time", "rank")


def follow(job: int, run: Path, total_steps: int | None) -> int:
    """Prints what changes until the job is over; returns its exit code. Ctrl-C ends only the watching."""
    news = _News(run, total_steps)
    before = ""
    try:
        while True:
            state = job_state(job)
            described = "over; SLURM has forgotten how" if state is None else state.describe()
            over = state is None or state.is_over
            news.tell(everything=over)
            if described != before:
                _print(f"job {job}: {described}")
                before = described
            if over:
                return _exit_code(state, news.last_event)
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        _print(f"no longer watching; job {job} goes on. To stop it: scancel {job}")
        return EXIT_DONE


def _exit_code(state: JobState | None, last_event: str) -> int:
    if state is None:
        return {"done": EXIT_DONE, "stopped": EXIT_STOPPED}.get(last_event, EXIT_FAILED)
    if state.name == "COMPLETED":
        return EXIT_DONE
    return state.exit_code if state.exit_code in (EXIT_USER_ERROR, EXIT_STOPPED) else EXIT_FAILED


class _News:
    """What was written to the run's folder since the last look; what was there before the job is not news."""

    def __init__(self, run: Path, total_steps: int | None) -> None:
        self._total = total_steps
        self._metrics, self._events = _Tail(run / METRICS), _Tail(run / EVENTS)
        self._told_at = float("-inf")
        self._latest: dict[str, Any] | None = None
        self.last_event = ""

    def tell(self, *, everything: bool) -> None:
        for event in self._events.new():
            self.last_event = str(event.get("kind", ""))
            if self.last_event not in _UNTOLD:
                told = {name: value for name, value in event.items() if name not in _UNTOLD_DETAILS}
                details = [f"{name} {value}" for name, value in told.items() if value is not None]
                _print(f"  {self.last_event}: {', '.join(details)}")
        for line in self._metrics.new():
            if "loss" in line:
                self._latest = line
        if self._latest is not None and (everything or time.monotonic() - self._told_at >= _PROGRESS_S):
            _print(f"  {_progress(self._latest, self._total)}")
            self._latest, self._told_at = None, time.monotonic()


class _Tail:
    """The lines that a file has gained. A file that became shorter was rewound by a restart: its end counts again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = path.stat().st_size if path.exists() else 0

    def new(self) -> Iterator[dict[str, Any]]:
        try:
            with open_regular(self._path) as file:
                size = file.seek(0, 2)
                if size < self._read:
                    self._read = size
                file.seek(self._read)
                data = file.readall()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]  # a last line that is being written comes next time
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def _progress(line: dict[str, Any], total: int | None) -> str:
    words = [f"step {line.get('step')}{f' of {total}' if total else ''}", f"loss {line['loss']}"]
    if isinstance(line.get("loss"), float):
        words[1] = f"loss {line['loss']:.4g}"
    if isinstance(line.get("samples_per_s"), int | float):
        words.append(f"{line['samples_per_s']:.3g} samples/s")
    return ", ".join(words)


def _print(text: str) -> None:
    print(text, flush=True)
