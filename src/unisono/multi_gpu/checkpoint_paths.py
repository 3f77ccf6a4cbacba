"""Where a script keeps its checkpoints: what may be there, and what must."""

from __future__ import annotations

from pathlib import Path

from unisono.errors import ConfigError
from unisono.observe.folder import RUN


def check_there(path: Path) -> None:
    """Refuses what cannot be a checkpoint."""
    if not path.is_dir():
        what = "is a file, and checkpoints are folders" if path.exists() else "is not there"
        raise ConfigError(f"load_checkpoint: {path} {what}; give what save_checkpoint has made, or a run's folder")


def check_place(folder: Path) -> None:
    """Refuses a place for a checkpoint where something else is."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigError(
            f"{folder} is a file, and a checkpoint is a folder (safetensors and JSON); choose another name, or move "
            "the file away"
        )
    if (folder.parent / RUN).exists() and folder.name == "checkpoints":
        raise ConfigError(f"{folder} is where a run keeps its own checkpoints; choose another name")
    strange = [each.name for each in folder.iterdir() if not _is_ours(each.name)] if folder.is_dir() else []
    if strange:
        raise ConfigError(f"{folder} holds {sorted(strange)[0]}, which is no checkpoint; choose another name")


def _is_ours(name: str) -> bool:
    return name.startswith(("step_", ".staging-", ".trash-", "best.json", ".best"))
