"""Saves checkpoints without stopping training.

`Saver.save` copies this rank's part of the state to host memory and returns. A thread of each rank then writes its
shard with PyTorch's distributed checkpoint and reads it back, and rank 0 commits once every rank has reported success.
The threads use their own process group, so their collectives never mix with the collectives of a step.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from unisono.checkpoint.all_ranks import RanksFailed, describe_failure, on_all_ranks
from unisono.checkpoint.commit import begin, check_shard, commit, discard, prune, write_best
from unisono.checkpoint.contents import describe
from unisono.checkpoint.find import leftovers, leftovers_until, step_folder, validate
from unisono.checkpoint.manifest import FileEntry, read_manifest
from unisono.checkpoint.shards import shard_name, write_shards
from unisono.checkpoint.snapshot import Snapshot, State, check_names, fingerprint, shapes_of
from unisono.faults import Injector

T = TypeVar("T")


@dataclass(frozen=True)
class SaveResult:
    """How a save ended. If both path and error are set, the checkpoint is complete, but cleaning up failed."""

    step: int
    path: Path | None  # path of the complete checkpoint
    seconds: float
    bytes: int
    error: str | None = None


@dataclass(frozen=True)
class Best:
    """Marks a save as the best so far by an evaluation metric; the best checkpoint is never pruned."""

    metric: str
    value: float


@dataclass(frozen=True)
class _Attempt:
    """The input of one save, which does not change while training continues."""

    step: int
    parts: dict[str, torch.Tensor]  # the tensors that this rank writes, whole or in part
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    fingerprint: str
    extra: str
    best: Best | None
    error: str | None  # error of the copy to host memory
    started: float


class Saver:
    """Saves checkpoints of a run to one folder, in the background. Every rank creates a Saver."""

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
        replaces: bool = False,
    ) -> None:
        """`group` is a gloo group of all ranks that only saves use; None for a single rank. `identity` names the run.

        With `replaces`, a save replaces this run's existing checkpoint of the same step instead of keeping it.
        """
        if (group is None) != (world == 1):
            raise ValueError(f"a Saver for {world} ranks needs {'no' if world == 1 else 'a'} process group")
        self._folder = folder
        self._rank, self._world, self._group = rank, world, group
        self._keep_last, self._asynchronous, self._identity = keep_last, asynchronous, dict(identity)
        self._injector, self._replaces = injector or Injector(), replaces
        self._snapshot = Snapshot(rank, world)
        # Lists leftovers before this run's first save, because later ones could belong to a run that is still alive.
        self._leftovers = leftovers(folder) if rank == 0 else []
        self._unmarked: tuple[int, Best] | None = None  # the best checkpoint, while best.json could not be written
        self._thread: threading.Thread | None = None
        self._broken: Exception | None = None  # set if the ranks lost their connection during a save
        self._finished: queue.SimpleQueue[SaveResult] = queue.SimpleQueue()

    @property
    def is_saving(self) -> bool:
        """Whether a save is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_warming_up(self) -> bool:
        """Whether the allocation that `warm_up` started is still running."""
        return self._snapshot.is_warming_up

    def warm_up(self, tensors: State) -> None:
        """Allocates page-locked memory for saves of these tensors, in the background.

        The allocation takes longer than the copy (seconds for 12 GB). Without it, the first save would have to wait.
        """
        if self._asynchronous:
            self._snapshot.warm_up(tensors)

    def save(self, step: int, tensors: State, extra: Mapping[str, Any], *, best: Best | None = None) -> None:
        """Saves the state of `step`. First waits for a save that is still running. On return, the tensors may change.

        `extra` is state other than tensors, in types that JSON supports. `best` marks the save as the best so far.
        """
        check_names(tensors)
        extra_json = json.dumps(extra, indent=1)
        self._join()
        started = time.monotonic()
        parts: dict[str, torch.Tensor] = {}
        error = None
        try:
            parts = self._snapshot.take(tensors)
        except Exception as problem:  # probably out of memory; the save thread reports it to the other ranks
            error = describe_failure(problem)
        attempt = _Attempt(step, parts, shapes_of(tensors), fingerprint(tensors), extra_json, best, error, started)
        if not self._asynchronous:
            self._run(attempt)
            return
        # Use a daemon thread, so that this rank can exit after a peer has died. A normal exit calls wait().
        self._thread = threading.Thread(target=self._run, args=(attempt,), name=f"save-{step}", daemon=True)
        self._thread.start()

    def wait(self) -> list[SaveResult]:
        """Waits for the running save; returns all results that have not been returned yet."""
        self._join()
        return self.poll()

    def let_finish(self, seconds: float) -> None:
        """Waits up to `seconds` for a running save, without returning its result."""
        if self._thread is not None:
            self._thread.join(None if seconds == math.inf else seconds)

    def poll(self) -> list[SaveResult]:
        """Returns the results of finished saves that have not been returned yet; does not block.

        If the save thread lost its connection to a rank, this method raises the thread's exception.
        """
        if self._broken is not None:
            raise self._broken
        results = []
        while not self._finished.empty():
            results.append(self._finished.get())
        return results

    def tidy(self, step: int) -> None:
        """Deletes the leftovers of interrupted saves at the end of a run, once its last step `step` is saved.

        Every save deletes them too, but an earlier attempt may have been killed between its last save and the clean-up.
        """
        self._join()
        if self._rank == 0:
            for path in leftovers_until(step, self._leftovers):  # later ones may belong to another run that is alive
                discard(path)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._broken is not None:
            raise self._broken

    def _on_all_ranks(self, work: Callable[[], T]) -> list[T]:
        return on_all_ranks(work, world=self._world, group=self._group)

    def _run(self, attempt: _Attempt) -> None:
        path, size, error = None, 0, None
        try:
            path, size = self._write(attempt)
            self._on_all_ranks(lambda: self._clean_up(attempt, path))
        except RanksFailed as problem:  # all ranks raised it, so training continues
            error = describe_failure(problem)
        except Exception as problem:  # the exchange failed because a peer died, so this rank must not continue alone
            self._broken = problem
            return
        seconds = time.monotonic() - attempt.started
        self._finished.put(SaveResult(attempt.step, path, seconds, size, error))

    def _write(self, attempt: _Attempt) -> tuple[Path, int]:
        """Writes and commits a checkpoint; returns its path and size. Fails on every rank if it fails on any."""
        fingerprints = self._on_all_ranks(lambda: self._ready(attempt))
        if len(set(fingerprints)) > 1:
            raise RanksFailed("the ranks do not have tensors of the same names, shapes and dtypes")
        # Create the folder only when every rank is ready, so that an earlier failure leaves nothing to clean up.
        begun = self._on_all_ranks(lambda: self._begin(attempt))[0]
        assert begun is not None
        staging, existing_bytes = begun
        if existing_bytes is not None:
            return staging, existing_bytes
        try:
            self._on_all_ranks(lambda: self._write_shard(attempt, staging))
            checked = self._on_all_ranks(lambda: self._check_shard(attempt, staging))
            shards = {name: entry for files in checked for name, entry in files.items()}
            committed = self._on_all_ranks(lambda: self._commit(attempt, staging, shards))[0]
        except RanksFailed:
            if self._rank == 0:
                discard(staging)
            raise
        assert committed is not None
        return committed

    def _ready(self, attempt: _Attempt) -> str:
        self._injector.at("save-begin", attempt.step)
        if attempt.error is not None:
            raise RanksFailed(f"copying to host memory failed: {attempt.error}")
        return attempt.fingerprint

    def _begin(self, attempt: _Attempt) -> tuple[Path, int | None] | None:
        """Creates a staging folder, or returns the step's existing checkpoint and its size. Works on rank 0 only."""
        if self._rank != 0:
            return None
        existing = self._folder / step_folder(attempt.step)
        if not self._replaces and validate(existing, identity=self._identity) is None:
            return existing, read_manifest(existing).total_bytes
        return begin(self._folder, attempt.step), None

    def _write_shard(self, attempt: _Attempt, staging: Path) -> None:
        def before() -> None:
            self._injector.at("save-write", attempt.step)

        write_shards(attempt.parts, staging, rank=self._rank, world=self._world, before=before)

    def _check_shard(self, attempt: _Attempt, staging: Path) -> dict[str, FileEntry]:
        self._injector.at("save-check", attempt.step)
        checked = check_shard(staging / shard_name(self._rank, self._world))
        self._injector.at("save-commit", attempt.step)  # here, because no rank may fail once rank 0 commits
        return checked

    def _commit(self, attempt: _Attempt, staging: Path, shards: dict[str, FileEntry]) -> tuple[Path, int] | None:
        if self._rank != 0:
            return None
        if describe(staging) != attempt.shapes:
            raise RanksFailed("the written files do not contain the tensors of this save")
        path = commit(
            staging,
            step=attempt.step,
            world=self._world,
            identity=self._identity,
            extra=attempt.extra,
            shards=shards,
            replaces=self._replaces,
        )
        return path, read_manifest(path).total_bytes

    def _clean_up(self, attempt: _Attempt, committed: Path | None) -> None:
        """Marks the best checkpoint, prunes old ones and deletes leftovers, on rank 0 after a commit."""
        self._injector.at("saved", attempt.step, saved=committed)
        if self._rank != 0 or committed is None:
            return
        if attempt.best is not None:
            self._unmarked = attempt.step, attempt.best
        failure = self._mark_best()
        # Prunes even if marking failed, because on a full disk this frees the space for the next save.
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
        """Writes best.json; if that fails, returns the error and retries after the next save."""
        if self._unmarked is not None:
            step, best = self._unmarked
            try:
                write_best(self._folder, step=step, metric=best.metric, value=best.value)
            except OSError as error:
                return error
            self._unmarked = None
        return None
