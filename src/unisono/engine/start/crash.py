"""Records an exception that ends a rank: where it happened, its traceback, and whether another rank failed first."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from unisono import tracebacks
from unisono.atomic_files import write_atomically
from unisono.cluster.environment import World
from unisono.cluster.hangs.heartbeat import Beat
from unisono.cluster.process_group import open_store
from unisono.errors import UnisonoError
from unisono.formatting import describe_exception
from unisono.observe.folder import append_event

_NOWHERE = "-"
_OTHER_RANK_S = 2.0  # seconds to wait for the rank that failed first to write the path of its traceback
_STORE_S = 5.0  # seconds to wait for the store; the rank that hosts it may be gone


def note_crash(
    error: BaseException, world: World, beat: Beat, run_folder: Path | None, job_folder: Path | None
) -> None:
    """Adds rank, phase and step to the exception, and saves the full traceback if the bug is in the recipe.

    `job_folder` is the folder of unisono's launcher, if it started this rank.
    """
    if isinstance(error, UnisonoError):
        return
    error.add_note(f"on rank {world.rank}, in {beat.phase} of step {beat.step}")
    if world.launcher == "plain" and isinstance(error, Exception) and run_folder is not None:
        append_event(run_folder, "failed", step=beat.step, rank=0, error=describe_exception(error))
    claim = None if job_folder is None else job_folder / f"failed_attempt{world.restart_count}"
    is_first = _is_first(world, claim)
    tracebacks.attach(error, tracebacks.Report(world.rank, is_first))
    in_user_code = isinstance(error, Exception) and tracebacks.is_in_user_code(error)
    path: Path | str | None = None
    if is_first and in_user_code:
        name = f"step_{beat.step:08d}-attempt{world.restart_count}-rank{world.rank}"
        path = tracebacks.save(error, run_folder, name)
    if claim is not None and is_first:
        _publish_path(claim, str(path or _NOWHERE))
    elif claim is not None and in_user_code:
        path = _read_path(claim)
    if path is not None:
        error.add_note(f"full traceback: {path}")


def _is_first(world: World, claim: Path | None) -> bool:
    """Whether this rank is the first to fail in this attempt; under our launcher, the first on this machine."""
    if world.size == 1:
        return True
    try:
        if claim is not None:
            claim.touch(exist_ok=False)
            return True
        return open_store(world, "crash", _STORE_S).add("failed", 1) == 1
    except (RuntimeError, OSError):  # another rank was first, or the rank that hosts the store has died
        return False


def _publish_path(claim: Path, path: str) -> None:
    with contextlib.suppress(OSError):
        write_atomically(claim, path)


def _read_path(claim: Path) -> str | None:
    """Returns the path of the first failing rank's traceback; the launcher may show this rank's error instead."""
    deadline = time.monotonic() + _OTHER_RANK_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if text := claim.read_text():
                return None if text == _NOWHERE else text
        time.sleep(0.01)
    return None
