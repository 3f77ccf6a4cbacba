"""The micro-batch size for the next attempt after running out of memory, stored in the run's `memory.json`."""

from __future__ import annotations

from pathlib import Path

from unisono.errors import UserError
from unisono.observe.note import leave_note
from unisono.plain_files import NotRegular, read_json

_FILE = "memory.json"


def smaller(micro_batch: int, share: int) -> int | None:
    """The next size to try after `micro_batch` samples of a rank's `share` did not fit; None if that was one sample."""
    tried = min(micro_batch, share)
    return None if tried <= 1 else -(-tried // 2)


def remember(run_folder: Path, micro_batch: int) -> None:
    """Stores the size that the next attempt should try."""
    leave_note(run_folder / _FILE, {"micro_batch": micro_batch})


def remembered(run_folder: Path) -> int | None:
    """The size that the previous attempt stored; None if there is none."""
    try:
        size = read_json(run_folder / _FILE)["micro_batch"]
    except NotRegular as error:  # writing our file would replace it
        raise UserError(f"{run_folder / _FILE} cannot be read ({error.strerror}); remove it") from None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return size if isinstance(size, int) and size >= 1 else None
