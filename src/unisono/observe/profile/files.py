"""The files of a profile. Each profile has its own folder in the run folder and never overwrites an earlier one.

profile/steps_4-8/            the profiled steps; a second profile of the same steps is steps_4-8-2
    summary.txt, summary.json tables of operators, kernels and waits
    waits.svg                 where the step of each rank waits
    rank_0.json.gz            the trace of each rank, for ui.perfetto.dev or chrome://tracing
    memory_rank_0.json, .svg  memory over time (with `memory`)
profile/oom_step_7/           what was in memory when a step ran out of memory (`--oom_snapshot`)
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.atomic_files import atomic_file, write_atomically

FOLDER, SUMMARY, SUMMARY_TEXT, WAITS = "profile", "summary.json", "summary.txt", "waits.svg"
_NAME = re.compile(r"(?P<kind>steps|oom_step)_(?P<step>\d{1,15})(-\d{1,15})?(-(?P<copy>\d{1,4}))?")
_MOST_COPIES = 1000


def new_folder(run_folder: Path, name: str) -> Path:
    """Creates profile/NAME in the run folder, or NAME-2, NAME-3, … if it exists; raises OSError if that fails."""
    parent = run_folder / FOLDER
    parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, _MOST_COPIES):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{parent} has {_MOST_COPIES} folders {name}")


def steps_text(first: int, last: int) -> str:
    """Returns the steps in words, as in "step 4" or "steps 4 to 8"."""
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def steps_folder(first: int, last: int) -> str:
    """Returns the folder's name, always with both numbers, so that a suffix such as -2 is unambiguous."""
    return f"steps_{first}-{last}"


def trace_name(rank: int) -> str:
    """Returns the name of the file with a rank's trace."""
    return f"rank_{rank}.json.gz"


def memory_name(rank: int) -> str:
    """Returns the name of the file with a rank's memory over time."""
    return f"memory_rank_{rank}.json"


def compress(source: Path, target: Path) -> None:
    """Writes the compressed content of a file to a new file."""
    with (
        atomic_file(target) as temporary,
        open(source, "rb") as plain,
        gzip.open(temporary, "xb", compresslevel=4) as packed,
    ):
        shutil.copyfileobj(plain, packed, 2**20)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file, compressed if its name ends with .gz."""
    text = json.dumps(content, allow_nan=False, default=str).encode()
    write_atomically(path, gzip.compress(text, 4) if path.suffix == ".gz" else text)


def folders_of(run_folder: Path, kind: str) -> list[Path]:
    """Returns the folders of the profiles (`steps`) or snapshots (`oom_step`) of a run, oldest first."""
    parent = run_folder / FOLDER
    if parent.is_symlink():  # a report shows nothing from outside the run folder
        return []
    try:
        names = os.listdir(parent)
    except OSError:
        return []
    found = []
    for name in names:
        match, path = _NAME.fullmatch(name), parent / name
        if match is not None and match["kind"] == kind and path.is_dir() and not path.is_symlink():
            found.append((path.stat().st_mtime, int(match["step"]), int(match["copy"] or 1), path))
    return [path for *_, path in sorted(found)]
