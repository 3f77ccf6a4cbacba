"""Whether a file that cannot be read is one that was not written, or not copied, to its end."""

from __future__ import annotations

from pathlib import Path

_MOST_PARTS = 10_000  # a file of nothing but tiny parts is no film
_FILM = {b"ftyp", b"mdat", b"wide", b"free", b"skip"}
_TABLES = {b"moov", b"moof"}


def hint(path: Path) -> str:
    """The end of a sentence about an MP4 or MOV file without its table of contents; empty for any other file."""
    try:
        if not path.is_file():  # a pipe would be waited for, for ever
            return ""
        names, cut_off = _parts(path)
    except OSError:
        return ""
    if not names or names[0] not in _FILM or b"mdat" not in names or _TABLES & set(names):
        return ""
    how = "it ends too soon" if cut_off else "it was not finished"
    return f"; it has no table of contents (moov), which mostly stands at the end: {how}; copy or record it again"


def _parts(path: Path) -> tuple[list[bytes], bool]:
    """The names of a file's parts in their order, and whether the last one goes on behind the file's end."""
    names: list[bytes] = []
    length, at = path.stat().st_size, 0
    with path.open("rb") as file:
        while at < length and len(names) < _MOST_PARTS:
            file.seek(at)
            head = file.read(16)
            size, name = int.from_bytes(head[:4], "big"), head[4:8]
            size = int.from_bytes(head[8:16], "big") if size == 1 else size or length - at
            if size < 8 or len(name) < 4:
                break
            names.append(name)
            at += size
    return names, at > length
