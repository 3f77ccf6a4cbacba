"""Writes the report of a run, or the comparison of several, to a file. Overwrites an older page, but no other file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unisono.atomic_files import write_atomically
from unisono.errors import UserError
from unisono.observe.report import comparison
from unisono.observe.report.page import KIND, page
from unisono.observe.report.previews import read_previews
from unisono.observe.report.read import read_run
from unisono.pages.kit import generator

REPORT, COMPARISON = "report.html", "comparison.html"


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Writes the report of the run in `folder` to `output` (default: report.html in `folder`); returns its path."""
    file = folder / REPORT if output is None else output
    run = read_run(folder)
    _check_overwritable(file, KIND)
    return _write(file, page(run, read_previews(folder)))


def write_comparison(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Writes the page that compares the runs in `folders` (default: comparison.html in the current folder)."""
    if len(folders) > comparison.MOST_RUNS:
        raise UserError(f"report compares at most {comparison.MOST_RUNS} runs, not {len(folders)}; pass fewer")
    resolved = [folder.resolve() for folder in folders]
    twice = next((folder for place, folder in enumerate(folders) if resolved[place] in resolved[:place]), None)
    if twice is not None:
        raise UserError(f"{twice} is listed twice; list each run once")
    file = Path(COMPARISON) if output is None else output
    runs = [read_run(folder) for folder in folders]
    _check_overwritable(file, comparison.KIND)
    return _write(file, comparison.comparison(runs))


def _write(file: Path, text: str) -> Path:
    try:
        write_atomically(file, text)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{file} cannot be written ({reason}); choose another --output") from None
    return file


def _check_overwritable(file: Path, kind: str) -> None:
    try:
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise UserError(f"{file} is not a regular file; choose another --output")
        if not file.exists():
            return
        with open(file, "rb") as before:
            is_ours = generator(kind).encode() in before.read(200)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{file} cannot be written ({reason}); choose another --output") from None
    if not is_ours:
        raise UserError(f"{file} exists and is not a unisono {kind}; choose another --output")
