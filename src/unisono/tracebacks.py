"""How a crash is shown: a recipe's own bug on one screen, ours in full.

A bug in a recipe's loss lies under dozens of frames of unisono and torch, which say nothing about it. What is shown are
the frames of the user's code, the last of ours before them, and where the error was raised; the whole traceback goes
to a file. An error whose innermost frame outside of libraries is ours counts as our bug, and shows everything.
"""

from __future__ import annotations

import os
import sysconfig
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

from unisono.formatting import shorten_middle

Owner = Literal["user", "unisono", "library"]
Frame = TypeVar("Frame")

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARY_FOLDERS = tuple(
    os.path.abspath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_INSTALLED = ("site-packages", "dist-packages")
_MOST_FRAMES, _FIRST_FRAMES = 12, 4
_LONGEST_LINE = 400
_REPORT = "_unisono_report"
_PASSING_ON = ("__torch_function__", "__torch_dispatch__")


@dataclass(frozen=True)
class Report:
    """What a session has found out about an exception that ends it."""

    rank: int
    is_first: bool
    """Whether no other rank of the run had failed before."""


def attach(error: BaseException, report: Report) -> None:
    """Leaves the report on the exception, for whoever shows it."""
    setattr(error, _REPORT, report)


def report_of(error: BaseException) -> Report | None:
    """The report that `attach` has left."""
    report: Report | None = getattr(error, _REPORT, None)
    return report


def owner_of(filename: str) -> Owner:
    """Whose code a frame of this file is."""
    path = os.path.abspath(filename)
    if path.startswith(_HERE):
        return "unisono"
    generated = filename.startswith(("<frozen", "<string>", "<attrs", "<__array_function__"))
    if generated or path.startswith(_LIBRARY_FOLDERS) or any(part in path.split(os.sep) for part in _INSTALLED):
        return "library"
    return "user"


def is_users(error: BaseException) -> bool:
    """Whether the error comes from code that we have called and not written."""
    owners = [_owner_of_entry(entry) for entry in _entries(error.__traceback__)]
    return "unisono" in owners and next((each for each in reversed(owners) if each != "library"), None) == "user"


def location(error: BaseException) -> str:
    """The file and line of the innermost frame of the user's code; of any code where there is none of the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if owner_of(frame.filename) == "user"]
    innermost = (users or frames)[-1]
    return f"{os.path.basename(innermost.filename)}:{innermost.lineno}"


def shown(error: BaseException) -> str:
    """The traceback as people see it: short for a user's bug, whole for ours."""
    if not is_users(error):
        return bearable(whole(error))
    exception = traceback.TracebackException.from_exception(error)
    for each in _chain(exception):
        each.stack[:] = _kept(list(each.stack), [owner_of(frame.filename) for frame in each.stack])
    return bearable("".join(exception.format()), 25)


def whole(error: BaseException) -> str:
    """The traceback as python would print it."""
    return "".join(traceback.format_exception(error))


def prune(error: BaseException) -> None:
    """Takes the frames that `shown` leaves out from the exception itself, before it goes on to the user's code."""
    seen: set[int] = set()
    current: BaseException | None = error
    users = is_users(error)
    while users and current is not None and id(current) not in seen:
        seen.add(id(current))
        entries = list(_entries(current.__traceback__))
        pruned: TracebackType | None = None
        for entry in reversed(_kept(entries, [owner_of(each.tb_frame.f_code.co_filename) for each in entries])):
            pruned = TracebackType(pruned, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        current.__traceback__ = pruned
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def keep(error: BaseException, run_folder: Path | None, name: str) -> Path | None:
    """Writes the whole traceback to a file, in the run's folder once there is a run in it; None where that fails."""
    text = whole(error)
    with suppress(OSError):
        if run_folder is not None and (run_folder / "run.json").exists():
            path = run_folder / "tracebacks" / f"{name}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, errors="replace")
            return path
    with suppress(OSError):
        handle, temporary = tempfile.mkstemp(prefix="unisono-traceback-", suffix=".txt")
        with os.fdopen(handle, "w", errors="replace") as file:
            file.write(text)
        return Path(temporary)
    return None


def keep_once(error: BaseException) -> None:
    """For an error that no session has seen: keeps the whole traceback of a user's bug and notes where."""
    if report_of(error) is None and isinstance(error, Exception) and is_users(error):
        path = keep(error, None, "")
        if path is not None:
            error.add_note(f"full traceback: {path}")


def bearable(text: str, half: int = 50) -> str:
    """A traceback whose message may be a book, in a length that people read: twice `half` lines at most."""
    lines = [shorten_middle(line, _LONGEST_LINE) for line in text.splitlines()]
    if len(lines) > 2 * half:
        lines = [*lines[:half], f"  … {len(lines) - 2 * half} lines …", *lines[-half:]]
    return "\n".join(lines)


def _kept(frames: Sequence[Frame], owners: Sequence[Owner]) -> list[Frame]:
    """The user's frames, the last of ours before the last of them, and the innermost one."""
    users = [i for i, owner in enumerate(owners) if owner == "user"]
    if not users:
        return list(frames)
    ours = [i for i, owner in enumerate(owners) if owner == "unisono" and i < users[-1]]
    indices = sorted({*users, *ours[-1:], len(frames) - 1})
    if len(indices) > _MOST_FRAMES:  # a recursion
        indices = indices[:_FIRST_FRAMES] + indices[_FIRST_FRAMES - _MOST_FRAMES :]
    return [frames[i] for i in indices]


def _owner_of_entry(entry: TracebackType) -> Owner:
    """Whose code an entry is; our torch-function modes only pass a call of the user's on, like a library."""
    code = entry.tb_frame.f_code
    if code.co_name in _PASSING_ON:
        return "library"
    return owner_of(code.co_filename)


def _chain(exception: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """The exception and those that led to it."""
    current: traceback.TracebackException | None = exception
    while current is not None:
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
