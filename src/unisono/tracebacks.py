"""Formats tracebacks: short ones for a bug in a recipe, complete ones for a bug in unisono.

If a recipe's loss raises, the traceback contains dozens of frames of unisono and torch that do not help the user.
unisono then prints only the frames of the user's code, unisono's last frame before them and the frame that raised, and
saves the full traceback to a file. If the innermost frame outside of libraries belongs to unisono, the bug is
unisono's, and the full traceback is printed.
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
_FORWARDING = ("__torch_function__", "__torch_dispatch__")


@dataclass(frozen=True)
class Report:
    """Facts about the exception that ends a rank."""

    rank: int
    is_first: bool
    """Whether no other rank of the run failed earlier."""


def attach(error: BaseException, report: Report) -> None:
    """Attaches a report to an exception, for the code that prints the exception."""
    setattr(error, _REPORT, report)


def report_of(error: BaseException) -> Report | None:
    """Returns the report that `attach` attached to the exception, or None."""
    report: Report | None = getattr(error, _REPORT, None)
    return report


def owner_of(filename: str) -> Owner:
    """Returns who owns the code in a file: the user, unisono or a library."""
    path = os.path.abspath(filename)
    if path.startswith(_HERE):
        return "unisono"
    generated = filename.startswith(("<frozen", "<string>", "<attrs", "<__array_function__"))
    if generated or path.startswith(_LIBRARY_FOLDERS) or any(part in path.split(os.sep) for part in _INSTALLED):
        return "library"
    return "user"


def is_in_user_code(error: BaseException) -> bool:
    """Whether user code that unisono called raised the error, directly or in a library."""
    owners = [_owner_of_entry(entry) for entry in _entries(error.__traceback__)]
    return "unisono" in owners and next((each for each in reversed(owners) if each != "library"), None) == "user"


def location(error: BaseException) -> str:
    """Returns the file and line of the innermost frame of user code, or of any code if there is no user code."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if owner_of(frame.filename) == "user"]
    innermost = (user_frames or frames)[-1]
    return f"{os.path.basename(innermost.filename)}:{innermost.lineno}"


def format_short(error: BaseException) -> str:
    """Returns the traceback to print: short for a bug in the user's code, complete for a bug in unisono."""
    if not is_in_user_code(error):
        return truncate_lines(format_full(error))
    exception = traceback.TracebackException.from_exception(error)
    for each in _chain(exception):
        each.stack[:] = _frames_to_show(list(each.stack), [owner_of(frame.filename) for frame in each.stack])
    return truncate_lines("".join(exception.format()), 25)


def format_full(error: BaseException) -> str:
    """Returns the full traceback, as Python prints it."""
    return "".join(traceback.format_exception(error))


def prune(error: BaseException) -> None:
    """Removes from the exception itself the frames that `format_short` omits, for callers that print it themselves."""
    seen: set[int] = set()
    current: BaseException | None = error
    in_user_code = is_in_user_code(error)
    while in_user_code and current is not None and id(current) not in seen:
        seen.add(id(current))
        entries = list(_entries(current.__traceback__))
        pruned: TracebackType | None = None
        for entry in reversed(
            _frames_to_show(entries, [owner_of(each.tb_frame.f_code.co_filename) for each in entries])
        ):
            pruned = TracebackType(pruned, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        current.__traceback__ = pruned
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def save(error: BaseException, run_folder: Path | None, name: str) -> Path | None:
    """Writes the full traceback to a file and returns its path, or None if it cannot be written.

    The file is tracebacks/<name>.txt in the run folder, or a temporary file if that folder does not contain a run.
    """
    text = format_full(error)
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


def save_if_unreported(error: BaseException) -> None:
    """Saves the full traceback of a bug in user code and adds the path to the exception, unless it has a report."""
    if report_of(error) is None and isinstance(error, Exception) and is_in_user_code(error):
        path = save(error, None, "")
        if path is not None:
            error.add_note(f"full traceback: {path}")


def truncate_lines(text: str, half: int = 50) -> str:
    """Returns the first and last `half` lines of a text, with long lines shortened."""
    lines = [shorten_middle(line, _LONGEST_LINE) for line in text.splitlines()]
    if len(lines) > 2 * half:
        lines = [*lines[:half], f"  … {len(lines) - 2 * half} lines …", *lines[-half:]]
    return "\n".join(lines)


def _frames_to_show(frames: Sequence[Frame], owners: Sequence[Owner]) -> list[Frame]:
    """Returns the frames of user code, unisono's last frame before these, and the innermost frame."""
    in_user_code = [i for i, owner in enumerate(owners) if owner == "user"]
    if not in_user_code:
        return list(frames)
    ours = [i for i, owner in enumerate(owners) if owner == "unisono" and i < in_user_code[-1]]
    indices = sorted({*in_user_code, *ours[-1:], len(frames) - 1})
    if len(indices) > _MOST_FRAMES:  # probably a recursion
        indices = indices[:_FIRST_FRAMES] + indices[_FIRST_FRAMES - _MOST_FRAMES :]
    return [frames[i] for i in indices]


def _owner_of_entry(entry: TracebackType) -> Owner:
    """Returns the owner of an entry's code.

    unisono's torch-function modes count as a library, because they only forward calls.
    """
    code = entry.tb_frame.f_code
    if code.co_name in _FORWARDING:
        return "library"
    return owner_of(code.co_filename)


def _chain(exception: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yields the exception and the chain of its causes or contexts."""
    current: traceback.TracebackException | None = exception
    while current is not None:
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
