"""Whether all machines of a run see the same folder: asked before training, not when the first save fails."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from unisono.cluster.agree import Agreement
from unisono.cluster.environment import World
from unisono.errors import UserError

_PATIENCE_S = 10.0  # network file systems may show a new file a little later


def check_shared(path: str | Path, world: World, agreement: Agreement, patience_s: float = _PATIENCE_S) -> None:
    """Refuses, on all ranks, a folder that is not the same one on every machine. Leaves nothing behind.

    The folder need not exist yet: the nearest one above it that does on machine 0 is looked at.
    """
    if world.num_nodes == 1:
        return
    target = Path(os.path.abspath(path))
    token: Path | None = None
    where: tuple[int, str] | None = None
    if world.is_main:
        levels, nearest = next((i, each) for i, each in enumerate((target, *target.parents)) if each.is_dir())
        try:
            handle, name = tempfile.mkstemp(prefix=".unisono-shared-", dir=nearest)
            os.close(handle)
            token, where = Path(name), (levels, Path(name).name)
        except OSError:
            pass  # whoever writes the run's folder says more about it
    try:
        where = agreement.main_says(where)
        # Relative to this machine's own view: the folder may have another name here and still be the same.
        sees = where is None or _finds([target, *target.parents][where[0]] / where[1], patience_s)
        blind = [machine for machine, found in agreement.agree_all((world.node, sees)) if not found]
    finally:
        if token is not None:
            token.unlink(missing_ok=True)
    if blind:
        raise UserError(
            f"output_dir {path} is not the same folder on machine {blind[0]} as on machine 0; "
            "a run on several machines needs one on a file system that all of them share"
        )


def _finds(token: Path, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while not token.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
