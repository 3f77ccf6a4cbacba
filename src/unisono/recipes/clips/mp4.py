"""New MP4 files: complete or not there, and never over another one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.errors import UserError

if TYPE_CHECKING:
    from av.container import OutputContainer


@contextmanager
def new_file(to: Path) -> Iterator[Path]:
    """A name to write to; the file gets its own one when it is complete, if nobody has taken that meanwhile."""
    taken = f"{to} is there already; nothing is overwritten: choose another --output_dir"
    if os.path.lexists(to):
        raise UserError(taken)
    partial = to.with_name(f".{to.name[:100]}.{secrets.token_hex(4)}")
    try:
        yield partial
        try:
            os.link(partial, to)  # unlike rename, never over another file
        except FileExistsError:
            raise UserError(taken) from None
        except OSError:  # a file system without links
            if os.path.lexists(to):
                raise UserError(taken) from None
            partial.rename(to)
    except OSError as error:
        raise UserError(f"{to} cannot be written ({error.strerror or error})") from None
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[OutputContainer]:
    """An MP4 file to be written."""
    import av

    # An absolute path: FFmpeg takes `http:clip` for an address. faststart: a browser can play before it has all of it.
    with av.open(str(path.absolute()), mode="w", format="mp4", options={"movflags": "+faststart"}) as container:
        yield container
