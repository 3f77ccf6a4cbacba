"""Examines the files of a checkpoint, each on one rank: hashes all of them and reads the headers of shards.

Hashing reads every byte, which takes minutes for a large checkpoint, so the ranks share it by bytes. They exchange what
they found. Afterwards every rank knows whether the checkpoint is damaged and where each tensor is, although it has
opened only its share of the files.
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
    """What a rank found out about a file."""

    damage: str | None = None  # why its bytes are not those that were saved
    header: TensorFile | None = None  # of a shard
    bad_header: str | None = None  # why the header cannot be used, although the bytes are right


class Examination:
    """Examines checkpoints on all ranks together; without arguments, on this process alone."""

    def __init__(
        self, rank: int = 0, world: int = 1, all_gather: Callable[[Any], list[Any]] = lambda value: [value]
    ) -> None:
        self._rank, self._world, self._all_gather = rank, world, all_gather
        self._findings: dict[Path, dict[str, _Finding]] = {}  # of undamaged checkpoints

    def damage(self, path: Path, files: Mapping[str, FileEntry]) -> str | None:
        """Why a file of the checkpoint is not the one that was saved, or None. All ranks call it together."""
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
        """What a checkpoint holds that `damage` found undamaged; CheckpointError if its headers contradict each other.

        No rank opens a file for it.
        """
        findings = [self._findings[path][name] for name in sorted(self._findings[path])]
        for finding in findings:
            if finding.bad_header is not None:
                raise CheckpointError(finding.bad_header)
        return contents_of(path, [finding.header for finding in findings if finding.header is not None])


def share_of_files(files: Mapping[str, FileEntry], rank: int, world: int) -> list[str]:
    """The files that a rank examines: about as many bytes as the others, and shard r of as many shards as ranks."""
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
