"""Checks before training that all machines see the same output folder. Otherwise the first save would fail."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from unisono.cluster.agree import Agreement
from unisono.cluster.environment import World
from unisono.errors import UserError

_VISIBLE_S = 10.0  # seconds; a network file system may show a new file with a delay


def check_shared(path: str | Path, world: World, agreement: Agreement, timeout_s: float = _VISIBLE_S) -> None:
    """Raises on all ranks if the folder is not the same on every machine. Leaves no file behind.

    The folder need not exist yet: the check uses its nearest parent that exists on machine 0.
    """
    if world.num_nodes == 1:
        return
    target = Path(os.path.abspath(path))
    token: Path | None = None
    location: tuple[int, str] | None = None  # of the token: number of levels above the target, and file name
    if world.is_main:
        levels, nearest = next((i, each) for i, each in enumerate((target, *target.parents)) if each.is_dir())
        try:
            handle, name = tempfile.mkstemp(prefix=".unisono-shared-", dir=nearest)
            os.close(handle)
            token, location = Path(name), (levels, Path(name).name)
        except OSError:
            pass  # creating the run folder will raise a better error
    try:
        location = agreement.broadcast(location)
        # Use this machine's own path, because the same folder may be mounted under another name here.
        visible = location is None or _becomes_visible([target, *target.parents][location[0]] / location[1], timeout_s)
        without = [machine for machine, is_visible in agreement.all_gather((world.node, visible)) if not is_visible]
    finally:
        if token is not None:
            token.unlink(missing_ok=True)
    if without:
        raise UserError(
            f"output_dir {path} is not the same folder on machine {without[0]} as on machine 0; "
            "use a folder on a file system that all machines share"
        )


def _becomes_visible(token: Path, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not token.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
