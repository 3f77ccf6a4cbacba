"""Remembers, in the run folder, what a user's tracker has received."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from unisono.atomic_files import write_atomically
from unisono.observe.trackers.tracker import EVERYTHING
from unisono.plain_files import read_json

FOLDER = ".tracked"


class Progress:
    """The last step, the last preview and the number of events that a tracker has received in all starts of a run."""

    def __init__(self, run_folder: Path, tracker: str) -> None:
        name = re.sub(r"[^\w.-]", "_", tracker.rpartition("/")[2])
        self._path = run_folder / FOLDER / f"{name}.json"
        self.step, self.events, self.last_preview = EVERYTHING, 0, (EVERYTHING, "")
        with suppress(OSError, ValueError, KeyError, TypeError):  # the first start, or a damaged file
            stored = read_json(self._path)
            step, name = stored["preview"]
            self.step, self.events, self.last_preview = int(stored["step"]), int(stored["events"]), (int(step), name)

    def store(self, step: int | None = None, events: int | None = None, preview: tuple[int, str] | None = None) -> None:
        """Changes some of the numbers and writes all of them to the run folder."""
        self.step = self.step if step is None else max(self.step, step)
        self.events = self.events if events is None else events
        self.last_preview = self.last_preview if preview is None else preview
        self._path.parent.mkdir(exist_ok=True)
        content = {"step": self.step, "events": self.events, "preview": self.last_preview}
        write_atomically(self._path, json.dumps(content), one_writer=True)
