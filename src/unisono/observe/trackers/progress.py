"""Records in the run folder what a user's tracker has received."""

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
    """The last step, the last previews and the number of events that a tracker has received in all starts of a run."""

    def __init__(self, run_folder: Path, tracker: str) -> None:
        name = re.sub(r"[^\w.-]", "_", tracker.rpartition("/")[2])
        self._path = run_folder / FOLDER / f"{name}.json"
        self.step, self.events = EVERYTHING, 0
        self._preview_step, self._previews = EVERYTHING, list[str]()  # the last step with previews, and their names
        with suppress(OSError, ValueError, KeyError, TypeError):  # the first start, or a damaged file
            stored = read_json(self._path)
            step, names = int(stored["preview_step"]), [str(name) for name in stored["previews"]]
            self.step, self.events = int(stored["step"]), int(stored["events"])
            self._preview_step, self._previews = step, names

    def lacks_preview(self, step: int, name: str) -> bool:
        """Whether the tracker has not received this preview yet."""
        return step > self._preview_step or (step == self._preview_step and name not in self._previews)

    def store(self, step: int | None = None, events: int | None = None, preview: tuple[int, str] | None = None) -> None:
        """Updates the record of what the tracker has received, and writes it to the run folder."""
        self.step = self.step if step is None else max(self.step, step)
        self.events = self.events if events is None else events
        if preview is not None:
            others = self._previews if preview[0] == self._preview_step else []
            self._preview_step, self._previews = preview[0], [*others, preview[1]]
        self._path.parent.mkdir(exist_ok=True)
        content = {"step": self.step, "events": self.events}
        content |= {"preview_step": self._preview_step, "previews": self._previews}  # type: ignore[dict-item]
        write_atomically(self._path, json.dumps(content), one_writer=True)
