"""Reads the profiles of a run folder: for the report, and for `Result.profile` in Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.observe.profile.files import SUMMARY, folders_of, memory_name
from unisono.observe.profile.summary import VERSION, as_text
from unisono.plain_files import read_json


@dataclass(frozen=True)
class Profile:
    """The profile of some steps of a run. `print(profile)` shows its tables."""

    folder: Path
    """The folder with the trace of every rank, the tables and the pictures."""
    summary: dict[str, Any]
    """The content of summary.json: `operators`, `kernels`, `ranks` (where each rank's step waits), `memory`."""

    def __str__(self) -> str:
        return as_text(self.summary)


def read_profile(folder: Path) -> Profile:
    """Reads the profile in a folder; raises OSError or ValueError if it is missing, damaged or of another version."""
    content = read_json(folder / SUMMARY)
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError("it is not a summary of this version of unisono")
    return Profile(folder, content)


def newest_profile(run_folder: Path) -> Profile | None:
    """Reads the newest readable profile of a run; None if there is none."""
    for folder in reversed(folders_of(run_folder, "steps")):
        try:
            return read_profile(folder)
        except (OSError, ValueError):
            continue
    return None


def read_memory(folder: Path, rank: int) -> dict[str, Any] | None:
    """Reads a rank's memory over time; None if the profile does not contain it, or the file is damaged."""
    try:
        content = read_json(folder / memory_name(rank))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
