"""Writes the page where the user wants it, over an older report but over nothing else."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from unisono.errors import UserError
from unisono.observe.report.page import SIGNATURE, page
from unisono.observe.report.previews import read_previews
from unisono.observe.report.reading import read_run

REPORT = "report.html"


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Writes the report of the run in a folder to `output` (report.html in that folder) and says where it is."""
    file = folder / REPORT if output is None else output
    run = read_run(folder)
    _check_free(file)
    text = page(run, read_previews(folder))
    new = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        try:
            with open(new, "x", encoding="utf-8", errors="replace") as out:
                out.write(text)
            os.replace(new, file)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}); choose another --output") from None
    return file


def _check_free(file: Path) -> None:
    if "\0" in str(file):
        raise UserError("--output: no file can have a name with a null character; choose another")
    try:
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise UserError(f"{file} is not a plain file; choose another --output")
        if not file.exists():
            return
        with open(file, "rb") as before:
            ours = SIGNATURE.encode() in before.read(200)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{file} cannot be written ({reason}); choose another --output") from None
    if not ours:
        raise UserError(f"{file} is there and is not a report of unisono's; it stays as it is: choose another --output")
