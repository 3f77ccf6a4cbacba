"""Examines the files of a checkpoint: hashes all of them, and reads the headers of the shards.

Hashing reads every byte, which takes minutes for a large checkpoint. So each rank examines a share of the files, with
about the same number of bytes, and the ranks exchange their findings. Afterwards every rank knows whether the
checkpoint is damaged and where each tensor is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.checkpoint.contents import Contents, contents_of, read_header
from unisono.checkpoint.find import why_damaged
from unisono.checkpoint.manifest import SHARD_SUFFIX, CheckpointError, FileEntry
from unisono.checkpoint.tensor_file import TensorFile


@dataclass(frozen=True)
class _Finding:
    """The result of examining one file."""

    damage: str | None = None  # reason if the file differs from the saved file
    header: TensorFile | None = None  # header, if the file is a shard
    bad_header: str | None = None  # reason if the header cannot be used, although the hash is right


class Examination:
    """Examines checkpoints on all ranks together, or, without arguments, in this process alone."""

    def __init__(
        self, rank: int = 0, world: int = 1, all_gather: Callable[[Any], list[Any]] = lambda value: [value]
    ) -> None:
        self._rank, self._world, self._all_gather = rank, world, all_gather
        self._findings: dict[Path, dict[str, _Finding]] = {}  # findings on undamaged checkpoints

    def damage(self, path: Path, files: Mapping[str, FileEntry]) -> str | None:
        """Returns why the checkpoint is damaged, or None if its files are as saved. All ranks must call it."""
        mine = share_of_files(files, self._rank, self._world)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashlib releases the GIL
            findings = dict(zip(mine, pool.map(lambda name: _examine(path / name, files[name]), mine), strict=True))
        by_name = {name: finding for part in self._all_gather(findings) for name, finding in part.items()}
        reasons = (by_name[name].damage for name in files)
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is None:
            self._findings[path] = by_name
        return reason

    def contents(self, path: Path) -> Contents:
        """Returns the contents of a checkpoint for which `damage` returned None, without opening a file.

        Raises CheckpointError if the headers of its shards contradict each other.
        """
        findings = [self._findings[path][name] for name in sorted(self._findings[path])]
        for finding in findings:
            if finding.bad_header is not None:
                raise CheckpointError(finding.bad_header)
        return contents_of(path, [finding.header for finding in findings if finding.header is not None])


def share_of_files(files: Mapping[str, FileEntry], rank: int, world: int) -> list[str]:
    """Returns the files that `rank` examines; every rank examines about the same number of bytes.

    If there are as many shards of the same size as ranks, each rank gets the shard with its own number.
    """
    total, before, mine = sum(entry.bytes for entry in files.values()), 0, []
    for name, entry in files.items():
        middle = before + entry.bytes / 2
        if min(world - 1, int(world * middle / max(1, total))) == rank:
            mine.append(name)
        before += entry.bytes
    return mine


def _examine(file: Path, entry: FileEntry) -> _Finding:
    if (damage := why_damaged(file, entry)) is not None:
        return _Finding(damage)
    try:
        return _Finding(header=read_header(file) if file.name.endswith(SHARD_SUFFIX) else None)
    except CheckpointError as error:
        return _Finding(bad_header=str(error))
