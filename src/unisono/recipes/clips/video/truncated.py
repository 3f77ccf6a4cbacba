"""Recognises MP4 and MOV files that were not recorded or copied completely."""

from __future__ import annotations

from pathlib import Path

_MOST_BOXES = 10_000  # limits the time spent on a file of many tiny boxes
_FIRST_BOXES = {b"ftyp", b"mdat", b"wide", b"free", b"skip"}
_INDEX_BOXES = {b"moov", b"moof"}


def hint(path: Path) -> str:
    """Returns a hint to append to the error message about an MP4 or MOV file without its index; otherwise empty."""
    try:
        if not path.is_file():  # opening a pipe would block
            return ""
        names, is_truncated = _boxes(path)
    except OSError:
        return ""
    if not names or names[0] not in _FIRST_BOXES or b"mdat" not in names or _INDEX_BOXES & set(names):
        return ""
    reason = "the file is truncated" if is_truncated else "the recording was not finished"
    return f"; its index (moov), which is usually at the end, is missing: {reason}; copy or record it again"


def _boxes(path: Path) -> tuple[list[bytes], bool]:
    """Returns the names of a file's top-level boxes, and whether the last box extends beyond the end of the file."""
    names: list[bytes] = []
    length, at = path.stat().st_size, 0
    with path.open("rb") as file:
        while at < length and len(names) < _MOST_BOXES:
            file.seek(at)
            head = file.read(16)
            size, name = int.from_bytes(head[:4], "big"), head[4:8]
            size = int.from_bytes(head[8:16], "big") if size == 1 else size or length - at
            if size < 8 or len(name) < 4:
                break
            names.append(name)
            at += size
    return names, at > length
