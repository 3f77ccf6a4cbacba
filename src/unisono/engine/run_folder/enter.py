"""Enters a run folder: locks it, reads which run is in it, and adopts that run's settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.checkpoint.find import list_steps
from unisono.cluster.shared_folder import check_shared
from unisono.config.resolve import Resolved
from unisono.engine.checks import check_settings
from unisono.engine.rank_context import RankContext
from unisono.engine.recipe import Recipe
from unisono.engine.run_folder.new_folder import lock_folder, read_own
from unisono.engine.run_folder.stored_settings import changed_settings, continue_run, record_of
from unisono.observe.folder import RunFolder, check_writable
from unisono.observe.lock import FolderLock
from unisono.observe.redaction import is_redacted, redacted_text
from unisono.settings import Settings
from unisono.storage.addresses import is_address
from unisono.typed_paths import as_typed


@dataclass(frozen=True)
class EnteredRun:
    """The run to create or resume: its folder and settings, the same on every rank."""

    recipe_class: type[Recipe]
    folder: RunFolder
    record: Mapping[str, Any] | None  # run.json, if the folder already holds a run
    origin: Mapping[str, Any] | None  # run.json of this run, or of the run whose checkpoint it continues from
    resolved: Resolved
    settings: Settings
    changed: Mapping[str, list[Any]]  # settings that have changed since the run's last start: name -> [old, new]
    resume_path: str  # the setting `resume`; for an address, the local path of the downloaded checkpoint
    remarks: Sequence[str] = ()  # notes for the user, on the main rank

    @property
    def recipe_name(self) -> str:
        """The recipe's name in run.json and in checkpoints."""
        return self.recipe_class.__qualname__

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.folder.path / "checkpoints"

    @property
    def stored_batch(self) -> int | None:
        """The effective batch in run.json."""
        return None if self.record is None else self.record.get("global_batch")

    @property
    def forgotten_secrets(self) -> list[str]:
        """Secret settings of an earlier start, which run.json does not store, that the user has not passed now."""
        stored = (self.origin or {}).get("config", {})
        return [name for name, value in stored.items() if is_redacted(value) and not self.resolved.explicit(name)]

    @property
    def earlier_resumes(self) -> set[str]:
        """The values of `resume` in earlier starts of this run."""
        return _earlier_resumes(self.record)


def enter_run_folder(
    recipe_class: type[Recipe], resolved: Resolved, rank: RankContext, *, is_locked: bool = False
) -> EnteredRun:
    """Locks the run folder and determines the run's settings; every rank calls it.

    `is_locked` means that the launcher of this run, or the caller, has already locked the folder.
    """
    recipe_name, classes = recipe_class.__qualname__, (Settings, recipe_class.Config)
    with ExitStack() as on_failure:
        lock: FolderLock | None = None  # held only by the main rank

        def take_lock() -> str:
            nonlocal lock
            path, lock = _take_lock(resolved, recipe_name, is_locked=is_locked)
            on_failure.callback(lock.release)
            return path

        path = rank.main_decides(take_lock)
        resolved = resolved.with_values(resolved.sources["output_dir"], output_dir=path)
        check_shared(path, rank.world, rank.agreement)
        remarks: list[str] = []
        rank.main_decides(lambda: remarks.extend(_restored(resolved, Path(path), recipe_name, rank)))
        record = rank.main_decides(lambda: read_own(path))
        resume = rank.main_decides(lambda: _fetched(resolved, Path(path), record, recipe_name, rank, remarks))
        origin = record or rank.main_decides(lambda: record_of(resume, Path(path), recipe_name))
        where = f"output_dir {path}" if record or resume == "auto" else f"resume {resume}"
        resolved = continue_run(resolved, origin, recipe_name, classes, where, recipe_class.fixed)
        changed = changed_settings(resolved, record, classes)
        settings = resolved.build(Settings)
        check_settings(settings)
        on_failure.pop_all()
    folder = RunFolder(path, lock)
    return EnteredRun(recipe_class, folder, record, origin, resolved, settings, changed, resume, remarks)


def _restored(resolved: Resolved, folder: Path, recipe: str, rank: RankContext) -> list[str]:
    """Restores the run from its copy in object storage if the folder lacks it; returns notes for the user."""
    address = resolved.values["mirror"]
    if address is None:
        return []
    notes = []
    if as_typed(folder) == address:
        notes.append(f"the run works in the folder {folder.name} of {folder.parent}; {address} is its copy")
    from unisono.mirror.restore import restore_run

    rank.heartbeat.at("prepare", 0)  # a download may take any amount of time
    is_named, resume = resolved.explicit("output_dir"), resolved.values["resume"]
    notes += restore_run(folder, address, recipe, resume=resume, is_named=is_named)
    return [redacted_text(note) for note in notes]


def _fetched(
    resolved: Resolved, folder: Path, record: Mapping[str, Any] | None, recipe: str, rank: RankContext, notes: list[str]
) -> str:
    """Returns the setting `resume`. Replaces an address from which this run has not begun yet by a downloaded copy."""
    resume = str(resolved.values["resume"])
    if not is_address(resume):
        return resume
    has_begun = rank.world.started_before or resume in _earlier_resumes(record)
    if has_begun and list_steps(folder / "checkpoints"):
        return resume
    from unisono.mirror.restore import fetch_to_resume

    rank.heartbeat.at("prepare", 0)
    path, remarks = fetch_to_resume(resume, recipe)
    notes += remarks
    return str(path)


def _earlier_resumes(record: Mapping[str, Any] | None) -> set[str]:
    values = [str(start.get("resume")) for start in (record or {}).get("starts", [])]
    paths = {value if value in ("auto", "never") else os.path.abspath(value) for value in values}
    return paths | set(values)


def _take_lock(resolved: Resolved, recipe: str, *, is_locked: bool) -> tuple[str, FolderLock]:
    """Locks the folder before anything reads it; creates a new folder if the user named none."""
    if not is_locked:
        resolved, lock = lock_folder(resolved, recipe)
        return str(resolved.values["output_dir"]), lock
    path = str(resolved.values["output_dir"])
    check_writable(path)
    lock = FolderLock(Path(path))
    lock.share()
    return path, lock
