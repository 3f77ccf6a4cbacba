"""Reads `--track`: the names of trackers and references to trackers of the user."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence

from unisono.config.values import did_you_mean
from unisono.errors import ConfigError
from unisono.observe.trackers.tracker import Tracker
from unisono.references import load_object
from unisono.typed_paths import absolute

TENSORBOARD = "tensorboard"
BUILT_IN = {
    "wandb": "unisono.observe.trackers.wandb_tracker:WandbTracker",
    "mlflow": "unisono.observe.trackers.mlflow_tracker:MlflowTracker",
}
"""Trackers that come with unisono and run in a process of their own -> module:class."""
_PACKAGES = {"wandb": ("wandb", "wandb"), "mlflow": ("mlflow", "mlflow-skinny"), TENSORBOARD: (TENSORBOARD,) * 2}


def named(track: str | None) -> list[str]:
    """Returns the distinct trackers in a value of `track`, except `tensorboard`, which runs in the training process."""
    return [name for name in _split(track) if name != TENSORBOARD]


def wants_tensorboard(track: str | None) -> bool:
    """Whether `track` names tensorboard."""
    return TENSORBOARD in _split(track)


def check_track(track: str | None) -> None:
    """Rejects unknown trackers, and trackers whose package is not installed."""
    for name in _split(track):
        if ":" in name:
            continue
        if name not in _PACKAGES:
            known = ", ".join(_PACKAGES)
            hint = did_you_mean(name, list(_PACKAGES))
            raise ConfigError(f"track {name}: expected {known}, or your own as my_file.py:MyTracker{hint}")
        module, package = _PACKAGES[name]
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"track {name}: {module} is not installed; run pip install {package}")


def check_own(track: str | None) -> None:
    """Imports the user's trackers, and rejects objects that are not subclasses of Tracker."""
    for name in named(track):
        if name not in BUILT_IN:
            load_tracker(name)


def load_tracker(name: str) -> Tracker:
    """Creates the tracker with this name or reference."""
    tracker = load_object(BUILT_IN.get(name, name), "tracker")
    if not (inspect.isclass(tracker) and issubclass(tracker, Tracker)):
        raise ConfigError(f"track {name}: it is not a tracker; make it a class that extends unisono.Tracker")
    try:
        inspect.signature(tracker).bind()
    except TypeError:
        raise ConfigError(f"track {name}: its __init__ must need no arguments; use open(run) instead") from None
    return tracker()


def with_absolute_files(track: str | None) -> str | None:
    """Makes the files of the user's trackers absolute, because a recipe may change the current folder."""
    if track is None:
        return None
    parts = [name.rpartition(":") for name in _split(track)]
    return ",".join(
        f"{absolute(file)}:{name}" if file.endswith(".py") else file + colon + name for file, colon, name in parts
    )


def _split(track: str | None) -> Sequence[str]:
    names = [name.strip() for name in (track or "").split(",")]
    return list(dict.fromkeys(name for name in names if name and name != "none"))
