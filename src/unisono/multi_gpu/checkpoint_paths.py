"""Checks the paths that a script passes to save_checkpoint and load_checkpoint."""

from __future__ import annotations

from pathlib import Path

from unisono.errors import ConfigError
from unisono.observe.folder import RUN


def check_source(path: Path) -> None:
    """Raises ConfigError if a path cannot be a checkpoint to load."""
    if not path.is_dir():
        problem = "is a file, but checkpoints are folders" if path.exists() else "does not exist"
        raise ConfigError(f"load_checkpoint: {path} {problem}; pass a path of save_checkpoint, or a run folder")


def check_target(folder: Path) -> None:
    """Raises ConfigError if saving a checkpoint to a folder would affect other files."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigError(
            f"{folder} is a file, but a checkpoint is a folder (safetensors and JSON); choose another name, or move "
            "the file"
        )
    if (folder.parent / RUN).exists() and folder.name == "checkpoints":
        raise ConfigError(f"{folder} contains the checkpoints of a run; choose another name")
    other_files = sorted(path.name for path in folder.iterdir() if not _is_ours(path.name)) if folder.is_dir() else []
    if other_files:
        raise ConfigError(f"{folder} contains {other_files[0]}, which is not a checkpoint; choose another name")


def _is_ours(name: str) -> bool:
    return name.startswith(("step_", ".staging-", ".trash-", "best.json", ".best"))
