"""One training run, any number of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Group", "Loss", "Recipe", "Tracker", "__version__", "bench", "train", "tune"]

if TYPE_CHECKING:
    from unisono import ray as ray
    from unisono.benching.bench import bench
    from unisono.engine.recipe import Loss, Recipe
    from unisono.engine.start.run import train
    from unisono.engine.turns.group import Group
    from unisono.observe.trackers.tracker import Tracker
    from unisono.tuning.tune import tune

_MODULES = {
    "Group": "unisono.engine.turns.group",
    "Recipe": "unisono.engine.recipe",
    "Loss": "unisono.engine.recipe",
    "Tracker": "unisono.observe.trackers.tracker",
    "bench": "unisono.benching.bench",
    "train": "unisono.engine.start.run",
    "tune": "unisono.tuning.tune",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `import unisono` and `unisono --help` do not wait for torch.
    from importlib import import_module

    if name == "ray":
        return import_module("unisono.ray")
    if name not in _MODULES:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
