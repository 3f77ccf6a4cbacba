"""Describes how a rank was started: by which launcher, as which rank, and for which devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from unisono.cluster.environment import World


@dataclass(frozen=True)
class RankStart:
    """The description of how this process was started."""

    world: World
    requested_devices: int | None = None
    """Number of devices requested on this machine; gradient accumulation compensates for missing ones."""
    job_folder: Path | None = None  # folder of the job, if unisono's launcher started this rank
    remarks: list[str] = field(default_factory=list)  # notes from the launcher, for the main rank to print
    trained: Event = field(default_factory=Event)  # set after the first successful step
    folder_is_locked: bool = False  # the launcher, or the caller, has locked the run folder
