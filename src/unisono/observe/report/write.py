"""Writes the report to a file. Overwrites an older report, but no other file."""

from __future__ import annotations

from pathlib import Path

from unisono.atomic_files import write_atomically
from unisono.errors import UserError
from unisono.observe.report.page import KIND, page
from unisono.observe.report.previews import read_previews
from unisono.observe.report.read import read_run
from unisono.pages.kit import generator

REPORT = "report.html"


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Writes the report of the run in `folder` to `output` (default: report.html in `folder`); returns its path."""
    file = folder / REPORT if output is None else output
    run = read_run(folder)
    _check_overwritable(file)
    text = page(run, read_previews(folder))
    try:
        write_atomically(file, text)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{file} cannot be written ({reason}); choose another --output") from None
    return file


def _check_overwritable(file: Path) -> None:
    try:
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise UserError(f"{file} is not a regular file; choose another --output")
        if not file.exists():
            return
        with open(file, "rb") as before:
            is_report = generator(KIND).encode() in before.read(200)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{file} cannot be written ({reason}); choose another --output") from None
    if not is_report:
        raise UserError(f"{file} exists and is not a unisono report; choose another --output")
