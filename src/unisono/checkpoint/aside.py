"""Checkpoints that were set aside: never deleted by us, because they may be somebody's, but not forgotten either."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from unisono.formatting import format_bytes

_ASIDE = re.compile(r"step_\d{8,}\.(bad|other|later)-\d+")


def remark_on_asides(folder: Path) -> str | None:
    """How many checkpoints in a folder were set aside, how large they are, and how to remove them; None without any."""
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    matches = [match for name in names if (match := _ASIDE.fullmatch(name)) is not None]
    if not matches:
        return None
    size = sum(_size(folder / match.group()) for match in matches)
    kinds, place = sorted({match.group(1) for match in matches}), shlex.quote(str(folder))
    patterns = " ".join(f"{place}/step_[0-9]*.{kind}-[0-9]*" for kind in kinds)
    count = "1 checkpoint that was" if len(matches) == 1 else f"{len(matches)} checkpoints that were"
    return f"{folder} holds {count} set aside ({format_bytes(size)}), which no run deletes; to remove: rm -r {patterns}"


def _size(path: Path) -> int:
    return sum(
        os.lstat(Path(place, name)).st_size
        for place, _, names in os.walk(path)
        for name in names
        if os.path.lexists(Path(place, name))
    )
