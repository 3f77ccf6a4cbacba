"""How many logged steps a resumed run has to repeat, because they came after its last checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.observe.folder import EVENTS, METRICS
from unisono.plain_files import open_regular, parse_json

_TAIL = 2**16  # bytes: enough for many lines, and nothing beside a file of a million


def steps_after(folder: Path, step: int) -> int:
    """Number of steps after `step` that the previous start logged; call it before metrics.jsonl is truncated."""
    logged = [step]
    for name in (METRICS, EVENTS):
        for line in _last_lines(folder / name):
            if isinstance(line.get("step"), int):
                logged.append(line["step"])
            if line.get("kind") in ("start", "resume"):  # events of earlier starts may lie in an abandoned future
                break
    return max(logged) - step


def _last_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects in the last lines of a file, the newest first; damaged lines are skipped."""
    try:
        with open_regular(file) as opened:
            opened.seek(max(0, os.fstat(opened.fileno()).st_size - _TAIL))
            lines = opened.read(_TAIL).splitlines()
    except OSError:
        return
    for line in reversed(lines):
        with suppress(ValueError):
            record = parse_json(line)
            if isinstance(record, dict):
                yield record
