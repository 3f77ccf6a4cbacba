"""New MP4 files: complete or not there, and never over another one."""

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
    """A name to write to; the file gets its own one when it is complete, if nobody has taken that meanwhile."""
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
    """An MP4 file to be written."""
    import av

    # An absolute path: FFmpeg takes `http:clip` for an address. faststart: a browser can play before it has all of it.
    with av.open(str(path.absolute()), mode="w", format="mp4", options={"movflags": "+faststart"}) as container:
        yield container
