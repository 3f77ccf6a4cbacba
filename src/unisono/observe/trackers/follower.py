"""Follows a run folder and passes new records to a tracker, each step once.

The run folder is the only source: metrics.jsonl contains each step once, in order, even after a restart. So a tracker
needs no queue in the training process, and a tracker that was slow, failed or started late receives what it missed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from unisono.observe.folder import EVENTS, METRICS, RUN
from unisono.observe.redaction import redacted
from unisono.observe.trackers.numbers import numbers_of
from unisono.observe.trackers.progress import Progress
from unisono.observe.trackers.tail import Tail
from unisono.observe.trackers.tracker import EVERYTHING, TrackedRun, Tracker
from unisono.plain_files import read_json

_FACTS = ("seed", "global_batch", "versions", "launcher", "created")
_STATES = {name: name for name in ("done", "stopped", "failed")} | dict.fromkeys(("start", "resume"), "interrupted")
"""Status of a run after an event of this kind."""


def tracked_run(folder: Path, *, project: str | None, offline: bool) -> TrackedRun:
    """Reads the run of a folder from its run.json."""
    record = read_json(folder / RUN)
    return TrackedRun(
        id=record["id"],
        name=folder.name,
        recipe=record["recipe"],
        folder=folder,
        config=redacted(record["config"]),
        facts={name: record[name] for name in _FACTS if name in record},
        project=project,
        offline=offline,
    )


class Follower:
    """Passes the records of a run folder to a tracker."""

    def __init__(self, tracker: Tracker, run: TrackedRun, name: str) -> None:
        self._tracker, self._run = tracker, run
        self._metrics, self._events = Tail(run.folder / METRICS), Tail(run.folder / EVENTS)
        self._progress = Progress(run.folder, name)
        self._opened_at = self._last = EVERYTHING
        self._remembers, self._num_events = False, 0
        self._reached = EVERYTHING  # the last step in the records read so far
        self._delivered = EVERYTHING - 1  # the last step that this process has delivered
        self._calls: deque[Callable[[], None]] = deque()  # calls of the tracker that are still to be made, in order
        self._held: list[dict[str, Any]] = []  # previews of steps whose metrics have not been read yet
        self._status = "interrupted"

    def open(self) -> None:
        """Opens the tracker. If the tracker raises, call it again."""
        last = self._tracker.open(self._run)
        self._remembers = last is None
        self._opened_at = EVERYTHING if last is None else last
        self._last = self._progress.step if last is None else last

    def deliver(self, *, everything: bool = False) -> bool:
        """Passes new records to the tracker; returns whether there were any. If the tracker raises, call it again.

        `everything`: the run has ended, so previews need not wait for further metrics.
        """
        any_new = False
        while True:
            if not self._calls:
                self._read(everything)
            if not self._calls:
                break
            any_new = True
            while self._calls:
                self._calls[0]()
                self._calls.popleft()  # removed only after the call, so that a call that raises is repeated
        if any_new:
            self._tracker.flush()
        return any_new

    def close(self) -> None:
        """Closes the tracker with the status in which the run ended."""
        self._tracker.flush()
        self._tracker.close(self._status)

    def _read(self, everything: bool) -> None:
        # Read the metrics first: a preview is then read together with all metrics that were written before it.
        metrics, events = self._metrics.read(), self._events.read()
        steps: list[tuple[int, Callable[[], None]]] = []
        for record in metrics:
            if isinstance(step := record.get("step"), int):
                steps.append((step, partial(self._log, record)))
                self._reached = max(self._reached, step)
        previews = [*self._held, *(event for event in events if _is_preview(event))]
        # If a preview's step is beyond the metrics read so far, the preview waits for them, because after the preview a
        # tracker may refuse metrics of earlier steps.
        all_read = everything and self._metrics.at_end
        self._held = [event for event in previews if event["step"] > self._reached and not all_read]
        shown = [event for event in previews if event not in self._held]
        steps += [(event["step"], partial(self._preview, event)) for event in shown]
        self._calls += [call for _, call in sorted(steps, key=lambda each: each[0])]
        for event in events:
            if not _is_preview(event):
                self._num_events += 1
                self._calls.append(partial(self._event, event, self._num_events))

    def _log(self, record: Mapping[str, Any]) -> None:
        step = record["step"]
        # A step may have two records: its training metrics, and then its evaluation.
        if step > self._last or step == self._delivered:
            self._tracker.log(step, numbers_of(record))
            self._last = self._delivered = max(self._last, step)
            if self._remembers:
                self._store(step=step)

    def _preview(self, event: Mapping[str, Any]) -> None:
        path = self._run.folder / "previews" / Path(event["file"]).name
        step = event["step"]
        if step > self._opened_at and self._progress.lacks_preview(step, path.name) and path.is_file():
            self._tracker.preview(step, path)
            self._store(preview=(step, path.name))

    def _event(self, event: Mapping[str, Any], number: int) -> None:
        if (kind := event.get("kind")) in _STATES:
            self._status = _STATES[kind]
        if not self._remembers or number > self._progress.events:
            self._tracker.event(event)
            if self._remembers:
                self._store(events=number)

    def _store(self, **values: Any) -> None:
        with suppress(OSError):  # a full disk; the next call stores it
            self._progress.store(**values)


def _is_preview(event: Mapping[str, Any]) -> bool:
    is_complete = isinstance(event.get("step"), int) and isinstance(event.get("file"), str)
    return event.get("kind") == "preview" and is_complete
