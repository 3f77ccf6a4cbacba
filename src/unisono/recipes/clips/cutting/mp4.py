"""Writes MP4 files that appear only when they are complete and never overwrite another file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.atomic_files import atomic_file
from unisono.errors import UserError

if TYPE_CHECKING:
    from av.container import OutputContainer


@contextmanager
def new_file(to: Path) -> Iterator[Path]:
    """Yields a temporary path; on success, renames the file to `to`, or raises UserError if `to` exists by then."""
    taken = f"{to} already exists and is not overwritten; choose another --output_dir"
    if os.path.lexists(to):
        raise UserError(taken)
    try:
        with atomic_file(to, overwrite=False) as temporary:
            yield temporary
    except FileExistsError:
        raise UserError(taken) from None
    except OSError as error:
        raise UserError(f"{to} cannot be written ({error.strerror or error})") from None


@contextmanager
def writing(path: Path) -> Iterator[OutputContainer]:
    """Opens a new MP4 file for writing."""
    import av

    # Passes an absolute path, because FFmpeg would take `http:clip` for a URL. faststart lets browsers play the file
    # before it is fully loaded.
    with av.open(str(path.absolute()), mode="w", format="mp4", options={"movflags": "+faststart"}) as container:
        yield container
