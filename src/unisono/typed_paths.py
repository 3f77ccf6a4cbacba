"""Paths of a run: absolute for file access, and as the user typed them for messages.

A recipe may call `os.chdir`, on import or later. So a relative `output_dir` is made absolute once, relative to the
folder in which the user started the program, before any code of the recipe runs; ranks get the absolute path. Messages
show paths as the user typed them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from unisono.errors import UserError

_start_folder: list[str] = []  # the folder in which the user started the program, if known
_typed: dict[str, str] = {}  # absolute path -> the path as the user typed it


def note_start_folder() -> None:
    """Makes the current folder the base of relative paths; called before any code of a recipe runs."""
    try:
        _start_folder[:] = [os.getcwd()]
    except FileNotFoundError:  # the folder was removed; only relative paths need it
        _start_folder.clear()


def absolute(path: str) -> str:
    """The absolute form of a path; `as_typed` will show it as the user typed it."""
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


def as_typed(text: object) -> str:
    """Replaces absolute paths in a text by the paths as the user typed them."""
    result = str(text)
    for full, typed in _typed.items():
        if full in result:  # a whole path, or the beginning of one, but not /runs/a in /runs/a2
            result = re.sub(rf"(?<![\w./-]){re.escape(full)}(?![\w-]|\.\w)", lambda match: typed, result)  # noqa: B023
    return result


def for_caller(path: str | os.PathLike[str]) -> str:
    """A path to return to Python code: as the user typed it, unless the current folder has changed since."""
    full = os.fspath(path)
    typed = _typed.get(full, full)
    return typed if os.path.abspath(typed) == full else full


def all_typed() -> Mapping[str, str]:
    """All paths with their typed form, for `adopt_typed` in another process of the run."""
    return dict(_typed)


def adopt_typed(typed: Mapping[str, str]) -> None:
    """Adopts the result of `all_typed` in the process that started this one."""
    _typed.update(typed)
