"""Sets checkpoints aside: renames them, so that no run loads them. unisono never deletes them, as users may want them.

The suffix `.bad-1` marks a damaged checkpoint, `.other-1` a checkpoint of another run, and `.later-1` a checkpoint of a
branch that the run abandoned when it went back to an earlier step.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.checkpoint.find import OF_ANOTHER_RUN, list_steps, validate
from unisono.checkpoint.manifest import CheckpointError
from unisono.formatting import format_bytes

_ASIDE = re.compile(r"step_\d{8,}\.(bad|other|later)-\d+")


def set_aside(path: Path, reason: str | None) -> Path:
    """Renames a checkpoint and returns its new path.

    `reason` says why the checkpoint cannot be used; None means that it belongs to an abandoned branch.
    """
    kind = "later" if reason is None else "other" if reason.startswith(OF_ANOTHER_RUN) else "bad"
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{kind}-{number}")):
        number += 1
    os.rename(path, aside)
    return aside


def set_aside_after(
    folder: Path, step: int, identity: Mapping[str, Any], unusable: Mapping[Path, str]
) -> list[tuple[Path, str]]:
    """Sets aside every checkpoint later than `step`, from which the run has resumed; returns (new path, reason) pairs.

    `unusable` contains the reasons that an earlier search found, by checkpoint. This function hashes no files.
    """
    moved = []
    for number, path in list_steps(folder):
        if number <= step:
            continue
        reason = unusable.get(path) or validate(path, deep=False, identity=identity)
        try:
            aside = set_aside(path, reason)
        except OSError as error:  # raise, or the run would resume from this checkpoint next time
            raise CheckpointError(
                f"{path} cannot be set aside ({error.strerror}); move it to another folder, because the run has "
                f"resumed from step {step}"
            ) from None
        moved.append((aside, reason or f"the run went back to step {step}"))
    return moved


def remark_on_asides(folder: Path) -> str | None:
    """Describes the checkpoints that are set aside in a folder, and how to remove them; None if there are none."""
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    matches = [match for name in names if (match := _ASIDE.fullmatch(name)) is not None]
    if not matches:
        return None
    size = sum(_size(folder / match.group()) for match in matches)
    quoted = shlex.quote(str(folder))
    patterns = " ".join(f"{quoted}/step_[0-9]*.{kind}-[0-9]*" for kind in sorted({match[1] for match in matches}))
    count = "1 checkpoint that was" if len(matches) == 1 else f"{len(matches)} checkpoints that were"
    return f"{folder} has {count} set aside ({format_bytes(size)}); no run deletes these; to remove: rm -r {patterns}"


def _size(path: Path) -> int:
    return sum(
        os.lstat(Path(folder, name)).st_size
        for folder, _, names in os.walk(path)
        for name in names
        if os.path.lexists(Path(folder, name))
    )
