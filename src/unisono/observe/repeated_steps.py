"""Counts the steps that a resumed run repeats, because the previous start computed them after its last checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.observe.folder import EVENTS, METRICS
from unisono.observe.json_lines import parse_record
from unisono.plain_files import open_regular

_TAIL_BYTES = 2**16  # number of bytes to read from the end of a file; enough for many lines


def count_repeated_steps(folder: Path, step: int) -> int:
    """Returns how many steps after `step` the previous start logged. Call it before metrics.jsonl is truncated."""
    logged = [step]
    for name in (METRICS, EVENTS):
        for record in _last_records(folder / name):
            if isinstance(record.get("step"), int):
                logged.append(record["step"])
            if record.get("kind") in ("start", "resume"):  # earlier events may belong to an abandoned branch
                break
    return max(logged) - step


def _last_records(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the records in the last lines of a file, the newest first; skips damaged lines."""
    try:
        with open_regular(file) as opened:
            opened.seek(max(0, os.fstat(opened.fileno()).st_size - _TAIL_BYTES))
            lines = opened.read(_TAIL_BYTES).splitlines()
    except OSError:
        return
    for line in reversed(lines):
        if (record := parse_record(line)) is not None:
            yield record
