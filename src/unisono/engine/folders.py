"""A run's folder before it is one: its name, whose it is, and what is written into it first."""

from __future__ import annotations

import platform
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from unisono.errors import UserError
from unisono.observe.folder import RunFolder


def read_own(path: str) -> dict[str, Any] | None:
    """What is known of the run in a folder; a folder with files of our names that is no run is left alone."""
    record = RunFolder.read(path)
    foreign = [name for name in ("metrics.jsonl", "events.jsonl") if Path(path, name).exists()]
    if record is None and foreign:
        lost = ""
        if Path(path, "checkpoints").is_dir():
            lost = f"; a run whose run.json was lost goes on by --resume {path} in another folder"
        raise UserError(f"output_dir {path} holds a {foreign[0]} but no run of unisono's; choose another folder{lost}")
    return record


def print_line(text: str) -> None:
    """A line for the user on stderr, where the progress line is too; a closed stderr does not end a run."""
    with suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)


def default_folder(recipe: str) -> str:
    """runs/<recipe>-<time>"""
    return f"runs/{recipe.lower()}-{time.strftime('%Y%m%d-%H%M%S')}"


def versions() -> dict[str, str]:
    """What the numbers of a run depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("unisono", "safetensors", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["gpu"] = torch.cuda.get_device_name()
    return found
