"""The interface of a tracker. A user's own tracker is a subclass of `Tracker`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVERYTHING = -1
"""The last step of a tracker that has not received any step yet."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker follows. Its settings contain no secrets."""

    id: str
    """Id of the run, the same at every start."""
    name: str
    """Name of the run folder."""
    recipe: str
    """Name of the recipe's class."""
    folder: Path
    """The run folder."""
    config: Mapping[str, Any]
    """Every setting of the run; secrets are replaced by a placeholder."""
    facts: Mapping[str, Any]
    """Seed, effective batch, versions and launcher."""
    project: str | None = None
    """Value of `track_project`."""
    offline: bool = False
    """Value of `track_offline`."""


class Tracker:
    """Receives the metrics, previews and events of a run. Subclass it and pass it as `--track my_file.py:MyTracker`.

    Its methods run in a process of their own on the main rank's machine, so they may be slow and cannot disturb
    training. If a method raises, unisono prints one warning and makes the same call again later.
    """

    say: Callable[[str], None] = staticmethod(lambda text: None)
    """Prints a line for the user; unisono sets it before `open`."""

    def open(self, run: TrackedRun) -> int | None:
        """Called at every start of the run. Returns the last step that the tracker has, or -1 if it has none.

        None means that the tracker does not know: unisono then continues after the last step for which `log` returned.
        Steps after the returned one are sent even if they were logged before this start.
        """
        return None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called with the metrics of a logged step, and with the metrics of an evaluation. Steps never decrease."""

    def preview(self, step: int, path: Path) -> None:
        """Called for each preview that the recipe writes: an image, a video or a text."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Called for each line of events.jsonl: a start, a restart, an out-of-memory error, a checkpoint, ..."""

    def flush(self) -> None:
        """Called after a group of the calls above; sends what they have collected, if anything."""

    def close(self, status: str) -> None:
        """Called at the end; `status` is done, stopped, failed, or interrupted if the run ended without an event."""
