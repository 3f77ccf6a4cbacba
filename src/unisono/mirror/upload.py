"""Copies a run to object storage while it trains.

`Upload` follows the run folder, like a tracker. Whenever a new checkpoint has been committed, it uploads the files of
the run, then the files of the checkpoint, and the manifest last. Only then does it delete old checkpoints, by the same
rule as the run. It retries failed uploads, and completes or removes what an interrupted process left behind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.checkpoint.commit import BEST, read_best
from unisono.checkpoint.find import list_steps, validate
from unisono.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, read_manifest
from unisono.errors import UserError
from unisono.mirror.remote_checkpoints import (
    CHECKPOINTS,
    LATER,
    RemoteCheckpoint,
    folder_for,
    leftovers,
    list_checkpoints,
)
from unisono.mirror.run_record import continues, other_run, read_record
from unisono.observe.folder import EVENTS, METRICS, RUN, RunFolder, append_event
from unisono.observe.side_process.child import GiveUp
from unisono.storage.store import Store

_AT_ONCE = 4  # number of files to upload at once
_PREVIEWS = "previews"


class Upload:
    """Uploads new files of a run folder; a follower of `unisono.observe.side_process`."""

    def __init__(self, folder: Path, store: Store, keep_last: int) -> None:
        self._folder, self._store, self._keep_last = folder, store, keep_last
        self._complete: dict[Path, bytes] = {}  # local path -> manifest content of each checkpoint in the store
        self._sent: dict[str, tuple[int, int]] = {}  # file of the run -> size and modification time when uploaded
        self._uploaded: set[tuple[str, str]] = set()  # name and hash of each checkpoint file that was uploaded
        self._identity: dict[str, Any] = {}

    def open(self) -> None:
        """Uploads run.json; raises GiveUp if the store holds another run."""
        self._claim()
        self._send(RUN)

    def deliver(self, *, everything: bool = False) -> None:
        """Uploads new checkpoints, newest first; with `everything`, also the final state of all other files."""
        new = [(path, manifest) for path, manifest in self._local() if self._complete.get(path) != _content(path)]
        for path, manifest in reversed(new):
            self._claim()
            self._send_records()
            with suppress(FileNotFoundError, CheckpointError):  # the run may have deleted the checkpoint meanwhile
                self._send_checkpoint(path, manifest)
        if new:
            self._send(f"{CHECKPOINTS}/{BEST}")
            self._tidy()
        if everything:
            self._claim()
            self._send_records()
            self._send(f"{CHECKPOINTS}/{BEST}")

    def close(self) -> None:
        """Does nothing, because nothing is open."""

    def _local(self) -> Iterator[tuple[Path, Manifest]]:
        """Yields the complete checkpoints of this run on the local disk, oldest first."""
        for _, path in list_steps(self._folder / CHECKPOINTS):
            with suppress(CheckpointError, OSError):
                if validate(path, deep=False, identity=self._identity) is None:
                    yield path, read_manifest(path)

    def _claim(self) -> None:
        """Raises GiveUp if the store holds another run, or if this run was continued elsewhere."""
        ours, theirs = RunFolder.read(self._folder), read_record(self._store)
        if ours is None:
            raise UserError(f"{self._folder / RUN} is missing")
        self._identity = {"recipe": ours["recipe"], "run": ours.get("id")}
        if theirs is None:
            self._sent.clear()
            self._complete.clear()
        elif theirs.get("id") != ours.get("id"):
            raise other_run(self._store)
        elif not continues(ours, theirs):
            raise GiveUp(
                f"{self._store.address}: the run was continued in another folder meanwhile; this one is not copied "
                "there any more"
            )

    def _send_records(self) -> None:
        # Called before a checkpoint is uploaded: the store then has the metrics of all steps up to the checkpoint.
        for name in (RUN, METRICS, EVENTS):
            self._send(name)
        previews = self._folder / _PREVIEWS
        for name in sorted(os.listdir(previews)) if previews.is_dir() else []:
            if not name.startswith("."):
                self._send(f"{_PREVIEWS}/{name}")

    def _send(self, name: str) -> None:
        """Uploads a file of the run if it has changed."""
        path = self._folder / name
        try:
            status = path.lstat()
        except FileNotFoundError:
            return
        state = status.st_size, status.st_mtime_ns
        if path.is_file() and not path.is_symlink() and self._sent.get(name) != state:
            self._store.upload(path, name)
            self._sent[name] = state

    def _send_checkpoint(self, path: Path, manifest: Manifest) -> None:
        started, content = time.monotonic(), _content(path)
        if content is None:
            return
        files = self._store.files(CHECKPOINTS)
        others = list_checkpoints(self._store, files)
        target = folder_for(manifest.step, content, others)
        if any(other.folder == target and other.problem is None for other in others):
            self._complete[path] = content
            return
        uploads = {f"{target}/{name}": (path / name, entry) for name, entry in manifest.files.items()}

        def upload(name: str) -> None:
            source, entry = uploads[name]
            if (name, entry.sha256) not in self._uploaded or files.get(name) != entry.bytes:
                self._store.upload(source, name)
                self._uploaded.add((name, entry.sha256))

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(upload, uploads))
        sizes = self._store.files(target)
        if any(sizes.get(name) != entry.bytes for name, (_, entry) in uploads.items()):
            self._uploaded -= {(name, entry.sha256) for name, (_, entry) in uploads.items()}
            raise UserError(f"{self._store.address}/{target}: the store does not contain what was uploaded")
        self._store.write(f"{target}/{MANIFEST}", content)
        self._complete[path] = content
        seconds, size = round(time.monotonic() - started, 3), manifest.total_bytes
        append_event(self._folder, "mirrored", step=manifest.step, rank=0, seconds=seconds, bytes=size)

    def _tidy(self) -> None:
        """Once a local checkpoint is in the store, sets abandoned checkpoints aside and deletes old ones."""
        local = {path: manifest for path, manifest in self._local() if self._complete.get(path) == _content(path)}
        if not local:
            return
        newest = max(manifest.step for manifest in local.values())
        contents = {manifest.step: self._complete[path] for path, manifest in local.items()}
        files = self._store.files(CHECKPOINTS)
        ours = [each for each in list_checkpoints(self._store, files) if each.is_of(self._identity)]
        current = []
        for each in ours:
            if each.step > newest or contents.get(each.step, each.content) != each.content:
                self._store.write(f"{each.folder}/{LATER}", each.content)
                self._store.delete([f"{each.folder}/{MANIFEST}"])
            else:
                current.append(each)
        self._prune(current, set(contents), files)
        self._store.delete(leftovers(files, newest))

    def _prune(self, current: list[RemoteCheckpoint], local: set[int], files: dict[str, int]) -> None:
        if self._keep_last <= 0:
            return
        complete = [each for each in current if each.problem is None]
        best = read_best(self._folder / CHECKPOINTS)
        keep = local | {each.step for each in complete[-self._keep_last :]} | {-1 if best is None else best["step"]}
        for each in complete:
            own = {f"{each.folder}/{MANIFEST}", *each.files()}
            in_folder = {name for name in files if name.startswith(f"{each.folder}/")}
            if each.step not in keep and in_folder <= own:
                self._store.delete([f"{each.folder}/{MANIFEST}"])  # first: without it, the rest is not a checkpoint
                self._store.delete(each.files())


def _content(path: Path) -> bytes | None:
    try:
        return (path / MANIFEST).read_bytes()
    except OSError:
        return None
