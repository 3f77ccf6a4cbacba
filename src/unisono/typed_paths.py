"""Makes the paths of a run absolute, and remembers how the user typed them.

A recipe may call `os.chdir`, on import or later. unisono therefore makes a relative `output_dir` absolute before any
code of the recipe runs, relative to the folder in which the user started the program. Ranks receive the absolute path,
and messages show the path as the user typed it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from unisono.errors import UserError

_start_folder: list[str] = []  # the folder in which the user started the program, if known
_typed: dict[str, str] = {}  # absolute path -> the path as the user typed it


def note_start_folder() -> None:
    """Makes the current folder the base of relative paths. Call it before any code of a recipe runs."""
    try:
        _start_folder[:] = [os.getcwd()]
    except FileNotFoundError:  # the folder was removed; only relative paths need it
        _start_folder.clear()


def absolute(path: str) -> str:
    """Returns the absolute form of a path, and remembers the typed form for `as_typed`."""
    path = os.path.expanduser(path)
    if os.path.isabs(path):
        return path
    if not _start_folder:
        note_start_folder()
    if not _start_folder:
        raise UserError(f"{path} is relative to the current folder, which was removed; change to another folder")
    full = os.path.normpath(os.path.join(_start_folder[0], path))
    _typed[full] = path
    return full


def note_typed(full: str, typed: str) -> None:
    """Makes `as_typed` show an absolute path as `typed`, for instance an address instead of its local folder."""
    _typed[full] = typed


def as_typed(text: object) -> str:
    """Returns a text with each absolute path replaced by the path that the user typed."""
    result = str(text)
    for full, typed in _typed.items():
        if full in result:  # replaces /runs/a, also in /runs/a/b, but not in /runs/a2
            result = re.sub(rf"(?<![\w./-]){re.escape(full)}(?![\w-]|\.\w)", lambda match: typed, result)  # noqa: B023
    return result


def for_caller(path: str | os.PathLike[str]) -> str:
    """Returns a path for the user's Python code: as typed, or absolute if the current folder has changed since."""
    full = os.fspath(path)
    typed = _typed.get(full, full)
    return typed if os.path.abspath(typed) == full else full


def all_typed() -> Mapping[str, str]:
    """Returns all absolute paths with their typed forms, for `adopt_typed` in another process of the run."""
    return dict(_typed)


def adopt_typed(typed: Mapping[str, str]) -> None:
    """Adds the result of `all_typed` from the process that started this one."""
    _typed.update(typed)
