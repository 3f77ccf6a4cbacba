"""Sends a run to Weights & Biases, or without a network to files that `wandb sync` uploads."""

from __future__ import annotations

import html
import inspect
import os
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unisono.observe.folder import EVENTS
from unisono.observe.trackers.tracker import EVERYTHING, TrackedRun, Tracker
from unisono.observe.trackers.wandb_store import last_step

_IMAGES, _VIDEOS = (".png", ".jpg", ".jpeg", ".bmp"), (".mp4", ".gif", ".webm", ".ogg")
_INIT_S = 60.0
# W&B must not collect the command line (it may contain secrets), the code, the output or the machine's load.
_PRIVATE = {
    "silent": True,
    "console": "off",
    "save_code": False,
    "disable_git": True,
    "disable_code": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "init_timeout": _INIT_S,
}


class WandbTracker(Tracker):
    """Uses one W&B run for all starts of a run, under the run's own id."""

    def open(self, run: TrackedRun) -> int | None:
        """Starts or resumes the W&B run; returns its last step."""
        import wandb

        self._wandb, self._folder = wandb, run.folder
        self._events: Counter[str] = Counter()
        offline = self._is_offline(run)
        try:
            self._run = self._init(run, offline)
        except wandb.errors.CommError as error:
            if offline:
                raise
            self.say(f"no connection ({error}); writing to {run.folder / 'wandb'}; upload it later with wandb sync")
            offline = True
            wandb.teardown()  # otherwise the id of the run is still in use
            self._run = self._init(run, offline)
        self._run.config.update({**run.config, "unisono": dict(run.facts)}, allow_val_change=True)
        if offline:
            return last_step(run.folder / "wandb", run.id)
        return int(self._run.starting_step) - 1 if self._run.resumed else EVERYTHING

    def _is_offline(self, run: TrackedRun) -> bool:
        mode = os.environ.get("WANDB_MODE", "online")
        if run.offline or mode != "online":
            return True
        if not self._has_key():
            self.say(f"no API key; writing to {run.folder / 'wandb'}; to upload it, run wandb login and wandb sync")
            return True
        return False

    def _has_key(self) -> bool:
        login = self._wandb.login
        if "prompt" in inspect.signature(login).parameters:
            return bool(login(prompt=False, verify=False))
        return bool(self._wandb.api.api_key)  # before wandb 0.31

    def _init(self, run: TrackedRun, offline: bool) -> Any:
        wandb = self._wandb
        known = {name: value for name, value in _PRIVATE.items() if name in wandb.Settings.model_fields}
        return wandb.init(
            id=run.id,
            name=os.environ.get("WANDB_NAME") or run.name,
            project=run.project or os.environ.get("WANDB_PROJECT") or run.recipe.lower(),
            dir=str(run.folder),
            mode="offline" if offline else "online",
            resume="allow",
            settings=wandb.Settings(**known),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics to the row of the step."""
        self._run.log(dict(metrics), step=step)

    def preview(self, step: int, path: Path) -> None:
        """Adds an image, a video or a text to the row of the step."""
        name, kind = f"previews/{path.stem.removeprefix(f'step_{step:08d}_')}", path.suffix.lower()
        wandb = self._wandb
        if kind in _IMAGES and find_spec("PIL"):
            self._run.log({name: wandb.Image(str(path))}, step=step)
        elif kind in _VIDEOS:
            self._run.log({name: wandb.Video(str(path), format=kind[1:])}, step=step)
        elif kind == ".txt":
            text = html.escape(path.read_text(errors="replace"))
            self._run.log({name: wandb.Html(f"<pre>{text}</pre>", inject=False)}, step=step)

    def event(self, event: Mapping[str, Any]) -> None:
        """Counts the event; the summary of the W&B run shows how often each kind of event occurred."""
        self._events[str(event.get("kind"))] += 1

    def flush(self) -> None:
        """Updates the counts of events."""
        self._run.summary.update({f"events/{kind}": count for kind, count in self._events.items()})

    def close(self, status: str) -> None:
        """Uploads the events and ends the W&B run; a stopped run can be resumed."""
        self._run.summary.update({"status": status})
        self._run.save(str(self._folder / EVENTS), base_path=str(self._folder), policy="now")
        if status == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "done" else 1)
