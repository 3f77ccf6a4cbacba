"""Saving without stopping the training.

`Saver.save` copies what this rank has to write to host memory and returns; a thread of each rank then writes its shards
with PyTorch's distributed checkpoint, reads them back, and rank 0 commits when every rank has reported success. The
threads talk over a process group of their own, so they never mix with the collectives of a training step.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from unisono.checkpoint.commit import begin, check_shard, commit, discard, prune, write_best
from unisono.checkpoint.find import leftovers, leftovers_until, step_folder, validate
from unisono.checkpoint.load import describe
from unisono.checkpoint.manifest import FileEntry, read_manifest
from unisono.checkpoint.shards import shard_name, write_shards
from unisono.checkpoint.snapshot import Snapshot, State, check_names, fingerprint, shapes_of
from unisono.checkpoint.together import RanksFailed, describe_failure, together
from unisono.faults import Injector


@dataclass(frozen=True)
class SaveResult:
    """How a save ended: `error` is None when the checkpoint at `path` is complete and tidied up, else says what failed.

    With both a path and an error the checkpoint is safe, but old ones could not be deleted or the best not be marked.
    """

    step: int
    path: Path | None
    seconds: float
    bytes: int
    error: str | None = None


@dataclass(frozen=True)
class Best:
    """Marks a save as the best so far by an evaluation metric; the best one is never pruned."""

    metric: str
    value: float


@dataclass(frozen=True)
class _Attempt:
    """All that the thread needs to know of one save; nothing in it changes while training goes on."""

    step: int
    parts: dict[str, torch.Tensor]
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    fingerprint: str
    extra: str
    best: Best | None
    error: str | None
    started: float


class Saver:
    """Saves checkpoints of a run into its folder `checkpoints/`, in the background; every rank makes one."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        world: int,
        group: dist.ProcessGroup | None,
        keep_last: int,
        asynchronous: bool,
        identity: Mapping[str, Any],
        injector: Injector | None = None,
    ) -> None:
        """`group` is a gloo group of all ranks used for nothing else (None for one rank); `identity` names the run.

        `injector` makes rehearsed faults happen while this rank saves.
        """
        if (group is None) != (world == 1):
            raise ValueError(f"{world} ranks need {'no' if world == 1 else 'a'} process group of their own")
        self._folder = folder
        self._rank = rank
        self._world = world
        self._group = group
        self._keep_last = keep_last
        self._asynchronous = asynchronous
        self._identity = dict(identity)
        self._injector = injector or Injector()
        mesh = None if group is None else DeviceMesh.from_group(group, "cpu")
        self._snapshot = Snapshot(rank, world, mesh)
        # What is there before our first save was left by a run that is over; later ones could be of a living one.
        self._leftovers = leftovers(folder) if rank == 0 else []
        self._unmarked: tuple[int, Best] | None = None  # the best checkpoint, where the disk did not take its mark
        self._thread: threading.Thread | None = None
        self._broken: Exception | None = None
        self._finished: queue.SimpleQueue[SaveResult] = queue.SimpleQueue()

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_warming_up(self) -> bool:
        """Whether memory is still being allocated."""
        return self._snapshot.is_warming_up

    def warm_up(self, tensors: State) -> None:
        """Allocates page-locked memory for saves like this one in the background, so that the first need not wait.

        Allocating it takes longer than copying to it (seconds for 12 GB).
        """
        if self._asynchronous:
            self._snapshot.warm_up(tensors)

    def save(self, step: int, tensors: State, extra: Mapping[str, Any], *, best: Best | None = None) -> None:
        """Saves the state of `step`; on return the tensors may change. Waits first for a save that is still running."""
        check_names(tensors)
        extra_json = json.dumps(extra, indent=1)
        self._join()
        started = time.monotonic()
        parts: dict[str, torch.Tensor] = {}
        error = None
        try:
            parts = self._snapshot.take(tensors)
        except Exception as problem:  # out of memory here must reach the other ranks, whose threads wait for ours
            error = describe_failure(problem)
        shapes, print_of_names = shapes_of(tensors), fingerprint(tensors)
        attempt = _Attempt(step, parts, shapes, print_of_names, extra_json, best, error, started)
        if not self._asynchronous:
            self._run(attempt)
            return
        # A daemon: if a peer died in the middle, this rank must be able to exit; a clean exit calls wait().
        self._thread = threading.Thread(target=self._run, args=(attempt,), name=f"save-{step}", daemon=True)
        self._thread.start()

    def wait(self) -> list[SaveResult]:
        """Blocks until the running save has ended; the outcomes not reported so far."""
        self._join()
        return self.poll()

    def let_finish(self, seconds: float) -> None:
        """Gives a save under way some time, before this rank ends because of something else."""
        if self._thread is not None:
            self._thread.join(None if seconds == math.inf else seconds)

    def poll(self) -> list[SaveResult]:
        """The outcomes of saves that have ended and were not reported so far; does not block.

        Where the ranks lost each other while saving (one died), that is raised here, in the thread that trains.
        """
        if self._broken is not None:
            raise self._broken
        results = []
        while not self._finished.empty():
            results.append(self._finished.get())
        return results

    def tidy(self, step: int) -> None:
        """Deletes what killed saves have left, at the end of a run whose last step `step` is saved.

        Every save does so too; but the attempt before may have been killed when all was saved and not yet tidied up.
        """
        self._join()
        if self._rank == 0:
            # Of later steps: perhaps of another run that is alive.
            for path in leftovers_until(step, self._leftovers):
                discard(path)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._broken is not None:
            raise self._broken

    def _run(self, attempt: _Attempt) -> None:
        path, size, error = None, 0, None
        try:
            path, size = self._write(attempt)
            together(lambda: self._tidy(attempt, path), world=self._world, group=self._group)
        except RanksFailed as problem:  # all ranks know, and train on
            error = describe_failure(problem)
        except Exception as problem:  # a peer that died: the exchange raises. To train on would be to train alone
            self._broken = problem
            return
        seconds = time.monotonic() - attempt.started
        self._finished.put(SaveResult(attempt.step, path, seconds, size, error))

    def _write(self, attempt: _Attempt) -> tuple[Path, int]:
        """The way of one checkpoint to its final name; raises the same error on every rank if any rank fails."""
        prints = together(lambda: self._ready(attempt), world=self._world, group=self._group)
        if len(set(prints)) > 1:
            raise RanksFailed("the ranks do not hold tensors of the same names, shapes and dtypes")
        # Made only when every rank is ready, so that there is nothing to clean up before.
        places = together(lambda: self._begin(attempt), world=self._world, group=self._group)
        assert places[0] is not None
        staging, existing_bytes = places[0]
        if existing_bytes is not None:
            return staging, existing_bytes
        try:
            together(lambda: self._write_shard(attempt, staging), world=self._world, group=self._group)
            checked = together(lambda: self._check_shard(attempt, staging), world=self._world, group=self._group)
            shards = {name: entry for files in checked for name, entry in files.items()}
            ends = together(lambda: self._commit(attempt, staging, shards), world=self._world, group=self._group)
        except RanksFailed:
            if self._rank == 0:
                discard(staging)
            raise
        assert ends[0] is not None
        return ends[0]

    def _ready(self, attempt: _Attempt) -> str:
        self._injector.at("save-begin", attempt.step)
        if attempt.error is not None:
            raise RanksFailed(f"copying to host memory failed: {attempt.error}")
        return attempt.fingerprint

    def _begin(self, attempt: _Attempt) -> tuple[Path, int | None] | None:
        """On rank 0: the folder to write to; or, with its size, the checkpoint of this step that is there already."""
        if self._rank != 0:
            return None
        existing = self._folder / step_folder(attempt.step)
        if validate(existing, identity=self._identity) is None:
            return existing, read_manifest(existing).total_bytes
        return begin(self._folder, attempt.step), None

    def _write_shard(self, attempt: _Attempt, staging: Path) -> None:
        def before() -> None:
            self._injector.at("save-write", attempt.step)

        write_shards(attempt.parts, staging, rank=self._rank, world=self._world, group=self._group, before=before)

    def _check_shard(self, attempt: _Attempt, staging: Path) -> dict[str, FileEntry]:
        self._injector.at("save-check", attempt.step)
        checked = check_shard(staging / shard_name(self._rank, self._world))
        self._injector.at("save-commit", attempt.step)  # before the exchange: once rank 0 commits, nobody may fail
        return checked

    def _commit(self, attempt: _Attempt, staging: Path, shards: dict[str, FileEntry]) -> tuple[Path, int] | None:
        if self._rank != 0:
            return None
        if describe(staging) != attempt.shapes:
            raise RanksFailed("the files read back do not hold the tensors that were to be saved")
        final = commit(
            staging, step=attempt.step, world=self._world, identity=self._identity, extra=attempt.extra, shards=shards
        )
        return final, read_manifest(final).total_bytes

    def _tidy(self, attempt: _Attempt, committed: Path | None) -> None:
        self._injector.at("saved", attempt.step, made=committed)
        if self._rank != 0 or committed is None:
            return
        if attempt.best is not None:
            self._unmarked = attempt.step, attempt.best
        failure = self._mark_best()
        # Also where the best could not be marked: on a full disk the deletion is what makes room for the next save.
        also_keep = () if self._unmarked is None else (self._unmarked[0],)
        prune(
            self._folder,
            keep_last=self._keep_last,
            committed=committed,
            identity=self._identity,
            also_keep=also_keep,
        )
        while self._leftovers:
            discard(self._leftovers.pop())
        if failure is not None:
            raise failure

    def _mark_best(self) -> OSError | None:
        """Writes which checkpoint is the best, now or, where the disk does not take it, after the next save."""
        if self._unmarked is not None:
            step, best = self._unmarked
            try:
                write_best(self._folder, step=step, metric=best.metric, value=best.value)
            except OSError as error:
                return error
            self._unmarked = None
        return None
