"""Paths of a run, absolute for files and as the user typed them for text.

A recipe may call `os.chdir`, when it is imported or later. So a relative `output_dir` is made absolute once, against
the folder in which the user started the program, before any code of the recipe runs; ranks get the absolute path. What
is printed stays as short as the user wrote it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from unisono.errors import UserError

_started_in: list[str] = []  # the folder in which the user started the program, if known
_typed: dict[str, str] = {}  # absolute path -> as the user typed it


def note_start_folder() -> None:
    """Relative paths belong to the current folder; called before any code of a recipe runs."""
    try:
        _started_in[:] = [os.getcwd()]
    except FileNotFoundError:  # it was removed; only a relative path needs it
        _started_in.clear()


def absolute(path: str) -> str:
    """The path in full; `shown` will print it as it was typed."""
    path = os.path.expanduser(path)
    if not os.path.isabs(path):
        if not _started_in:
            note_start_folder()
        if not _started_in:
            raise UserError(f"{path} is relative to the current folder, which was removed; change to another folder")
        full = os.path.normpath(os.path.join(_started_in[0], path))
        _typed[full] = path
        return full
    return path


def shown(text: object) -> str:
    """A text for the user, with the paths in it as they were typed."""
    result = str(text)
    for full, typed in _typed.items():
        if full in result:  # as a whole, or with something inside it; not /runs/a in /runs/a2
            result = re.sub(rf"(?<![\w./-]){re.escape(full)}(?![\w-]|\.\w)", lambda match: typed, result)  # noqa: B023
    return result


def usable(path: str | os.PathLike[str]) -> str:
    """A path for the caller of a function: as it was typed, unless the current folder has changed since."""
    full = os.fspath(path)
    typed = _typed.get(full, full)
    return typed if os.path.abspath(typed) == full else full


def known() -> Mapping[str, str]:
    """What `shown` knows, for another process of the same run."""
    return dict(_typed)


def take_over(typed: Mapping[str, str]) -> None:
    """What `known` has returned in the process that started this one."""
    _typed.update(typed)
