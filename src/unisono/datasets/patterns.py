"""Expands what the user passes as a dataset's files: paths, URLs, glob patterns and brace ranges."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from unisono.errors import UserError
from unisono.storage.addresses import is_remote, shown
from unisono.storage.file_systems import file_system

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST = 10**5  # maximum number of files; a larger number is probably a typing error
_DIGITS = 12


def expand(
    patterns: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], suffix: str, **options: Any
) -> list[str]:
    """Returns the files that the patterns match, in the order of the patterns; the matches of a glob are sorted.

    A local folder is expanded to the files in it whose names end in `suffix`. `options` are passed to fsspec.
    """
    several = [patterns] if isinstance(patterns, str | os.PathLike) else list(patterns)
    files: dict[str, None] = {}
    for pattern in several:
        text = os.fspath(pattern)
        singles = list(islice(_braces(text), _MOST + 1))
        if len(singles) > _MOST:
            raise UserError(f"{shown(text)} expands to more than {_MOST:,} files; correct the range in braces")
        for single in singles:
            for file in _glob(single, suffix, options):
                if file in files:
                    raise UserError(
                        f"{shown(file)} is listed twice, so its samples would be read twice; remove one of the two"
                    )
                files[file] = None
    if not files:
        raise UserError("no files were given; pass a path, a pattern such as shards/*.tar, or a list of them")
    return list(files)


def _braces(text: str) -> Iterator[str]:
    """Expands {000..099} and {a,b}, from left to right, as a shell does."""
    match = next((each for each in _BRACES.finditer(text) if _RANGE.fullmatch(each[1]) or "," in each[1]), None)
    if match is None:
        yield text
        return
    before, after = text[: match.start()], text[match.end() :]
    for choice in _choices(match[1]):
        for rest in _braces(after):
            yield f"{before}{choice}{rest}"


def _choices(inside: str) -> Iterator[str]:
    span = _RANGE.fullmatch(inside)
    if span is None:
        yield from inside.split(",")
        return
    if max(map(len, span.groups())) > _DIGITS or int(span[2]) < int(span[1]):
        raise UserError(f"{{{inside}}} is not a range; write the smaller number first, as in {{000..099}}")
    width = len(span[1]) if len(span[1]) == len(span[2]) or span[1].startswith("0") else 0
    yield from (f"{number:0{width}d}" for number in range(int(span[1]), int(span[2]) + 1))


def _glob(pattern: str, suffix: str, options: Mapping[str, Any]) -> list[str]:
    if is_remote(pattern):
        if not any(sign in pattern.partition("://")[2].partition("?")[0] for sign in "*["):
            return [pattern]
        files = file_system(pattern, **options)
        protocol = pattern.partition("://")[0]
        try:
            found = sorted(str(path) for path in files.glob(pattern))
        except Exception as error:  # each fsspec file system raises different types; messages may contain secrets
            raise UserError(f"{shown(pattern)} cannot be listed ({type(error).__name__})") from None
        found = [path if is_remote(path) else f"{protocol}://{path.lstrip('/')}" for path in found]
    else:
        path = os.path.abspath(os.path.expanduser(pattern.removeprefix("file://")))
        if os.path.isdir(path):
            path = os.path.join(glob.escape(path), f"*{suffix}")
        elif os.path.lexists(path) or not glob.has_magic(path):
            return [path]
        found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise UserError(f"{shown(pattern)}: no files match")
    return found
