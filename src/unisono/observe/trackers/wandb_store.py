"""Reads which steps the local files of W&B contain (`wandb/*/run-ID.wandb`), to continue after them.

A killed process loses the rows that W&B had not written yet, so only W&B's files show the last step that was stored.
They have the format of LevelDB's log: blocks of 32 KiB with records, and each record is a protocol buffer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.observe.trackers.tracker import EVERYTHING

_BLOCK, _HEADER = 32 * 2**10, 7
_FILE_HEADER = 7  # ":W&B", a magic number and a version
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def last_step(folder: Path, run_id: str) -> int:
    """Returns the last step in the local files of a run; -1 if there is none."""
    steps = [row["_step"] for file in files_of(folder, run_id) for row in rows(file)]
    return max(steps, default=EVERYTHING)


def files_of(folder: Path, run_id: str) -> list[Path]:
    """Returns the local files of a run, oldest first; each start of the run writes one."""
    return sorted(folder.glob(f"*-{run_id}/run-{run_id}.wandb"))


def rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file, each with its `_step`; stops at a damaged record."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    for data in _records(file.read_bytes()):
        record = Record()
        with suppress(Exception):  # protobuf's DecodeError; a damaged record must not end the tracker
            record.ParseFromString(data)
            if record.WhichOneof("record_type") != "history":
                continue
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            yield {**items, "_step": items.get("_step", record.history.step.num)}


def _records(content: bytes) -> Iterator[bytes]:
    position, parts = _FILE_HEADER, bytearray()
    while position + _HEADER <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:  # the rest of a block is too short for a header
            position += left
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        piece = content[position + _HEADER : position + _HEADER + length]
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or len(piece) < length:
            return  # the process was killed while it wrote this record
        position += _HEADER + length
        if kind in (_FULL, _FIRST):
            parts = bytearray()
        parts += piece
        if kind in (_FULL, _LAST):
            yield bytes(parts)
